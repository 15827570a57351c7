"""EndpointSettings: what the user decides about an endpoint, checked before the first call."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from peagle.deploy.sagemaker.plan.limits import check_arn, check_name, check_s3_prefix
from peagle.errors import UserError

REGISTRY = "763104351884.dkr.ecr.{region}.amazonaws.com"
DEFAULT_IMAGE = REGISTRY + "/vllm:0.27.1-gpu-py312-cu130-ubuntu22.04-sagemaker"
CUDA_13_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
MIN_STARTUP_SECONDS = 60
MAX_STARTUP_SECONDS = 3600

LEARN_VARIABLE = "SM_VLLM_LEARN"
LEARN_FOLDER = "/tmp/peagle-learn"


@dataclass(frozen=True, slots=True)
class Autoscale:
    """Scale the number of instances so that each has about `target` concurrent requests."""

    min_instances: int
    max_instances: int
    target: float

    def __post_init__(self) -> None:
        if not 1 <= self.min_instances <= self.max_instances:
            raise UserError(
                f"`autoscale` is {self.min_instances} {self.max_instances}: use 1 <= MIN <= MAX"
            )
        if not 0 < self.target < float("inf"):
            raise UserError(
                f"`autoscale` has a TARGET of {self.target:g} requests per instance:"
                " use more than 0"
            )


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    name: str
    role: str  # ARN
    instance: str
    region: str
    # s3://BUCKET/PREFIX/; empty: SageMaker's default bucket of the account and region.
    bucket: str = ""
    bucket_owner: str = ""  # id of an account; empty: that of the credentials
    image: str = ""  # empty: AWS's vLLM image
    ami: str = ""  # InferenceAmiVersion; empty: the one that the image needs, where known
    count: int = 1
    autoscale: Autoscale | None = None
    from_hub: bool = False  # the container downloads target and drafter itself
    isolated: bool = True  # the container has no network
    startup_seconds: int = 1800  # timeout of the container's start, and of the download
    notify: str = ""  # ARN of an SNS topic for alarms
    variables: Mapping[str, str] = field(default_factory=dict)  # added to the environment
    public: frozenset[str] = frozenset()  # names of variables whose values may be printed
    secret: frozenset[str] = frozenset()  # and of those that are never printed
    learn: bool = False  # `peagle serve --learn` in `image`

    def __post_init__(self) -> None:
        check_name(self.name)
        check_arn(self.role, "role", "iam", "role/")
        if self.notify:
            check_arn(self.notify, "notify", "sns", "")
        self._check_location()
        self._check_numbers()
        if self.from_hub and self.isolated:
            raise UserError("`from_hub` needs the network: omit `isolated`")
        if self.learn:
            self._add_learning()
        self._fill_defaults()

    def _add_learning(self) -> None:
        """What is learned lies on the instance, and ends with it."""
        if not self.image:
            raise UserError(
                "`learn` needs an image with `peagle serve`: push deploy/docker/Dockerfile.cuda,"
                " and give its URI with `image`"
            )
        object.__setattr__(self, "variables", {LEARN_VARIABLE: LEARN_FOLDER} | dict(self.variables))
        object.__setattr__(self, "public", self.public | {LEARN_VARIABLE})

    def _check_location(self) -> None:
        if not re.fullmatch(r"[a-z]{2,3}(-[a-z]+)+-\d", self.region):
            raise UserError(
                f"`region` {self.region!r} is not a region of AWS: give one like us-west-2"
            )
        if not re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9]+", self.instance):
            raise UserError(
                f"`instance` {self.instance!r} is not an instance type of SageMaker:"
                " give one like ml.g7e.2xlarge"
            )
        if self.bucket_owner and not re.fullmatch(r"\d{12}", self.bucket_owner, re.ASCII):
            raise UserError(
                f"`bucket_owner` {self.bucket_owner!r} is not the id of an account: give 12 digits"
            )
        if not self.image and not self.role.startswith("arn:aws:"):
            raise UserError(
                f"the image registry of {self.region} is unknown: give the URI with `image`"
            )

    def _check_numbers(self) -> None:
        if self.count < 1 or (self.autoscale and self.count > self.autoscale.max_instances):
            raise UserError(
                f"`count` is {self.count}: use 1 or more, and at most MAX of `autoscale`"
            )
        if not MIN_STARTUP_SECONDS <= self.startup_seconds <= MAX_STARTUP_SECONDS:
            raise UserError(
                f"`startup_seconds` is {self.startup_seconds}:"
                f" SageMaker allows {MIN_STARTUP_SECONDS} to {MAX_STARTUP_SECONDS}"
            )

    def _fill_defaults(self) -> None:
        # A role can be passed only within its account, so its ARN names the user's account.
        account = self.role.split(":")[4]
        bucket = self.bucket or f"s3://sagemaker-{self.region}-{account}/peagle/"
        bucket = bucket if bucket.endswith("/") else bucket + "/"
        object.__setattr__(self, "bucket", check_s3_prefix(bucket))
        image = self.image or DEFAULT_IMAGE.format(region=self.region)
        object.__setattr__(self, "image", image)
        if not self.ami and "-cu13" in image:
            object.__setattr__(self, "ami", CUDA_13_AMI)

    @property
    def vllm(self) -> str | None:
        """The version of vLLM in the image's tag; None if the tag does not name one."""
        match = re.search(r"/vllm:v?(\d+\.\d+\.\d+)", self.image)
        return match[1] if match else None
