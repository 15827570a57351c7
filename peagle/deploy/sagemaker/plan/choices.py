"""Choices: what a user decides about an endpoint, checked before the first call."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from peagle.deploy.sagemaker.plan.limits import check_arn, check_name, check_prefix
from peagle.errors import UserError

REGISTRY = "763104351884.dkr.ecr.{region}.amazonaws.com"
IMAGE = REGISTRY + "/vllm:0.27.1-gpu-py312-cu130-ubuntu22.04-sagemaker"
CUDA_13_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"


@dataclass(frozen=True, slots=True)
class Autoscale:
    """Instances from `least` to `most`, so that each has about `target` requests under way."""

    least: int
    most: int
    target: float

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise UserError(f"--autoscale {self.least} {self.most}: use 1 <= MIN <= MAX")
        if not 0 < self.target < float("inf"):
            raise UserError(
                f"--autoscale: TARGET is {self.target:g} requests per instance: use more than 0"
            )


@dataclass(frozen=True, slots=True)
class Choices:
    name: str
    role: str
    instance: str
    region: str
    bucket: str = ""  # s3://BUCKET/PREFIX/; empty: SageMaker's own of this account and region
    image: str = ""
    ami: str = ""  # of the instances; empty: the one that the image needs, as far as is known
    count: int = 1
    autoscale: Autoscale | None = None
    from_hub: bool = False  # the container fetches target and drafter itself
    isolated: bool = True  # no network for the container
    startup: int = 1800  # seconds the container may take, and as many the download
    notify: str = ""  # an SNS topic for alarms
    variables: Mapping[str, str] = field(
        default_factory=dict
    )  # more of the container's environment

    def __post_init__(self) -> None:
        check_name(self.name)
        check_arn(self.role, "--role", "iam", "role/")
        if self.notify:
            check_arn(self.notify, "--notify", "sns", "")
        if not re.fullmatch(r"[a-z]{2,3}(-[a-z]+)+-\d", self.region):
            raise UserError(f"--region {self.region!r} is no region: give one like us-west-2")
        if not re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9]+", self.instance):
            raise UserError(
                f"--instance {self.instance!r} is no type of SageMaker's: give one like ml.g7e.2xlarge"
            )
        if not self.image and not self.role.startswith("arn:aws:"):
            raise UserError(
                f"the container's registry in {self.region} is not known: give --image URI"
            )
        if self.count < 1 or (self.autoscale and self.count > self.autoscale.most):
            raise UserError(
                f"--count is {self.count}: use 1 or more, and no more than --autoscale's MAX"
            )
        if not 60 <= self.startup <= 3600:
            raise UserError(f"--startup-seconds is {self.startup}: SageMaker allows 60 to 3600")
        if self.from_hub and self.isolated:
            raise UserError("--from-hub needs the network: leave --isolated out")
        account = self.role.split(":")[
            4
        ]  # a role can be passed within its account only: it is ours
        bucket = self.bucket or f"s3://sagemaker-{self.region}-{account}/peagle/"
        object.__setattr__(
            self, "bucket", check_prefix(bucket if bucket.endswith("/") else bucket + "/")
        )
        object.__setattr__(self, "image", self.image or IMAGE.format(region=self.region))
        if not self.ami and "-cu13" in self.image:
            object.__setattr__(self, "ami", CUDA_13_AMI)

    @property
    def vllm(self) -> str | None:
        """The version in the image's tag, where it has one."""
        found = re.search(r"/vllm:v?(\d+\.\d+\.\d+)", self.image)
        return found[1] if found else None
