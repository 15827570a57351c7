"""Stack: everything an endpoint consists of, as data: uploads, then resources. The dry run prints it, CloudFormation
and Terraform spell it, `apply` does it."""

from dataclasses import dataclass, replace

from peagle.deploy.sagemaker.plan.artifact import Artifact
from peagle.deploy.sagemaker.plan.choices import Choices
from peagle.deploy.sagemaker.plan.environment import (
    CHANNEL,
    CHANNEL_FOLDER,
    MODEL,
    PREFIX,
    environment,
)
from peagle.deploy.sagemaker.plan.limits import check_environment, check_prefix
from peagle.deploy.sagemaker.resources.alarms import alarms_of
from peagle.deploy.sagemaker.resources.calls import Parameters, Resource
from peagle.deploy.sagemaker.resources.endpoint import config_of, endpoint_of, model_of
from peagle.deploy.sagemaker.resources.scaling import scaling_of
from peagle.deploy.spec import Deployment
from peagle.errors import UserError

VOCABULARIES = "TIKTOKEN_ENCODINGS_BASE"  # where gpt-oss finds its own without the network
LOGS = "/aws/sagemaker/Endpoints/"


@dataclass(frozen=True, slots=True)
class Upload:
    what: str
    artifact: Artifact
    uri: str  # ends in /


@dataclass(frozen=True, slots=True)
class Stack:
    name: str
    region: str
    uploads: tuple[Upload, ...]
    resources: tuple[Resource, ...]

    @property
    def logs(self) -> str:
        return LOGS + self.name


@dataclass(frozen=True, slots=True)
class Places:
    """Where target and drafter lie in S3: drafters of one target beside it, so that a new one moves few bytes."""

    root: str
    target: str
    drafter: str

    @classmethod
    def of(cls, bucket: str, pair: str, target: Artifact, drafter: Artifact) -> "Places":
        root = check_prefix(f"{bucket}{pair}/{target.identity}/")
        return cls(root, f"{root}target/", f"{root}{CHANNEL}-{drafter.identity}/")


def stack(
    choices: Choices,
    deployment: Deployment,
    target: Artifact,
    drafter: Artifact,
    channel: bool = True,
) -> Stack:
    """`channel`: the drafter on a channel of its own. Without, both lie in the model's folder."""
    places = Places.of(choices.bucket, deployment.pair, target, drafter)
    uploads = (Upload("target", target, places.target), Upload("drafter", drafter, places.drafter))
    if choices.from_hub:
        container: Parameters = {"Environment": environment(deployment)}
    else:
        container = container_of(deployment, places, channel, target.vocabularies)
    variables = container["Environment"] | choices.variables
    check_environment(variables)
    if choices.vllm and "parallel_drafting_spec" in variables.get(
        f"{PREFIX}SPECULATIVE_CONFIG", ""
    ):
        raise UserError(
            "no vLLM has parallel_drafting_spec: use parallel_drafting, or an image of the native engine"
        )
    container |= {"Image": choices.image, "Environment": variables}
    tags = [
        {"Key": "peagle:endpoint", "Value": choices.name},
        {"Key": "peagle:pair", "Value": deployment.pair},
    ]
    model = model_of(choices, container, tags)
    config = config_of(choices, model.name, tags)
    alarms = alarms_of(choices)
    endpoint = endpoint_of(choices, config.name, alarms, tags)
    scaling = scaling_of(choices.name, choices.autoscale) if choices.autoscale else ()
    resources = (model, config, *alarms, endpoint, *scaling)
    return Stack(choices.name, choices.region, () if choices.from_hub else uploads, resources)


def container_of(
    deployment: Deployment, places: Places, channel: bool, vocabularies: bool
) -> Parameters:
    """With the weights mounted: the drafter on its channel, or both below the model's folder."""
    target, drafter, mounted = MODEL, CHANNEL_FOLDER, places.target
    if not channel:
        target, drafter = (
            f"{MODEL}/{uri.removeprefix(places.root)[:-1]}"
            for uri in (places.target, places.drafter)
        )
        mounted = places.root
    variables = environment(replace(deployment, target=target, drafter=drafter))
    if vocabularies:
        variables[VOCABULARIES] = target
    container: Parameters = {
        "Environment": variables,
        "ModelDataSource": {"S3DataSource": data(mounted)},
    }
    if channel:
        container["AdditionalModelDataSources"] = [
            {"ChannelName": CHANNEL, "S3DataSource": data(places.drafter)}
        ]
    return container


def data(uri: str) -> Parameters:
    return {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}
