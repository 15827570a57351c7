"""Stack: everything that an endpoint consists of, as data: uploads, then resources.

The dry run prints it, CloudFormation and Terraform describe it, `apply` creates it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from peagle.deploy.sagemaker.plan.artifact import Artifact
from peagle.deploy.sagemaker.plan.choices import EndpointSettings
from peagle.deploy.sagemaker.plan.environment import (
    CHANNEL,
    CHANNEL_FOLDER,
    MODEL_FOLDER,
    TIKTOKEN_VARIABLE,
    VLLM_PREFIX,
    container_environment,
)
from peagle.deploy.sagemaker.plan.limits import check_environment, check_s3_prefix
from peagle.deploy.sagemaker.plan.public_names import secret_names
from peagle.deploy.sagemaker.resources.alarms import alarm_resources
from peagle.deploy.sagemaker.resources.calls import Parameters, Resource
from peagle.deploy.sagemaker.resources.endpoint import (
    config_resource,
    endpoint_resource,
    model_resource,
)
from peagle.deploy.sagemaker.resources.scaling import scaling_resources
from peagle.deploy.spec import Deployment
from peagle.errors import UserError

LOG_GROUP_PREFIX = "/aws/sagemaker/Endpoints/"


@dataclass(frozen=True, slots=True)
class Upload:
    kind: str  # "target" or "drafter"
    artifact: Artifact
    uri: str  # ends in /


@dataclass(frozen=True, slots=True)
class Stack:
    name: str
    region: str
    uploads: tuple[Upload, ...]
    resources: tuple[Resource, ...]
    secrets: frozenset[str]  # environment variables whose values are never printed

    @property
    def log_group(self) -> str:
        return LOG_GROUP_PREFIX + self.name


@dataclass(frozen=True, slots=True)
class S3Layout:
    """S3 prefixes of target and drafter.

    All drafters of a target share its root, so that a new drafter does not upload the target again.
    """

    root: str
    target: str
    drafter: str

    @classmethod
    def build(cls, bucket: str, pair: str, target: Artifact, drafter: Artifact) -> "S3Layout":
        root = check_s3_prefix(f"{bucket}{pair}/{target.identity}/")
        return cls(root, f"{root}target/", f"{root}{CHANNEL}-{drafter.identity}/")


def build_stack(
    settings: EndpointSettings,
    deployment: Deployment,
    target: Artifact,
    drafter: Artifact,
    channel: bool = True,
) -> Stack:
    """The stack of an endpoint.

    With `channel`, the drafter has a data channel of its own; without, both checkpoints are below
    the model's folder.
    """
    layout = S3Layout.build(settings.bucket, deployment.pair, target, drafter)
    uploads: tuple[Upload, ...] = ()
    if settings.from_hub:
        container: Parameters = {"Environment": container_environment(deployment)}
    else:
        container = mounted_container(deployment, layout, channel, target.has_tiktoken_files)
        uploads = (
            Upload("target", target, layout.target),
            Upload("drafter", drafter, layout.drafter),
        )
    variables = container["Environment"] | settings.variables
    check_environment(variables)
    check_vllm_config(settings, variables)
    if unknown := sorted(settings.public - variables.keys()):
        raise UserError(f"`public` has {unknown[0]!r}, which is not a variable of the container")
    container |= {"Image": settings.image, "Environment": variables}
    resources = stack_resources(settings, deployment.pair, container)
    secrets = secret_names(variables, settings.public) | settings.secret
    return Stack(settings.name, settings.region, uploads, resources, secrets)


def stack_resources(
    settings: EndpointSettings, pair: str, container: Parameters
) -> tuple[Resource, ...]:
    """All resources, in the order in which they are created."""
    tags = [
        {"Key": "peagle:endpoint", "Value": settings.name},
        {"Key": "peagle:pair", "Value": pair},
    ]
    model = model_resource(settings, container, tags)
    config = config_resource(settings, model.name, tags)
    alarms = alarm_resources(settings)
    endpoint = endpoint_resource(settings, config.name, alarms, tags)
    scaling = scaling_resources(settings.name, settings.autoscale) if settings.autoscale else ()
    return (model, config, *alarms, endpoint, *scaling)


def check_vllm_config(settings: EndpointSettings, variables: Mapping[str, str]) -> None:
    config = variables.get(f"{VLLM_PREFIX}SPECULATIVE_CONFIG", "")
    if settings.vllm and "parallel_drafting_spec" in config:
        raise UserError(
            "vLLM does not support parallel_drafting_spec:"
            " use parallel_drafting, or an image of the native engine"
        )


def mounted_container(
    deployment: Deployment, layout: S3Layout, channel: bool, has_tiktoken_files: bool
) -> Parameters:
    """The container with mounted weights: the drafter on its channel, or both in one folder."""
    if channel:
        target = MODEL_FOLDER
        drafter = CHANNEL_FOLDER
        mounted = layout.target
    else:
        target = f"{MODEL_FOLDER}/{layout.target.removeprefix(layout.root)[:-1]}"
        drafter = f"{MODEL_FOLDER}/{layout.drafter.removeprefix(layout.root)[:-1]}"
        mounted = layout.root
    variables = container_environment(replace(deployment, target=target, drafter=drafter))
    if has_tiktoken_files:
        variables[TIKTOKEN_VARIABLE] = target
    container: Parameters = {
        "Environment": variables,
        "ModelDataSource": {"S3DataSource": s3_data_source(mounted)},
    }
    if channel:
        container["AdditionalModelDataSources"] = [
            {"ChannelName": CHANNEL, "S3DataSource": s3_data_source(layout.drafter)}
        ]
    return container


def s3_data_source(uri: str) -> Parameters:
    return {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}
