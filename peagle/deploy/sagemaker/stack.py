"""Stack: everything an endpoint consists of, as data: uploads, then resources, each with the calls that make, read,
change and delete it. The dry run prints it, CloudFormation and Terraform spell it, `apply` does it.

Names of models and configs end in a digest of what they hold: the same choices give the same names, and other choices
never overwrite what serves.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from peagle.deploy.sagemaker.artifact import Artifact
from peagle.deploy.sagemaker.choices import Autoscale, Choices
from peagle.deploy.sagemaker.environment import CHANNEL, CHANNEL_FOLDER, MODEL, environment
from peagle.deploy.sagemaker.limits import DIGEST, check_environment, check_prefix
from peagle.deploy.spec import Deployment

Parameters = dict[str, Any]
VARIANT = "AllTraffic"
VOCABULARIES = "TIKTOKEN_ENCODINGS_BASE"  # where gpt-oss finds its own without the network
LOGS = "/aws/sagemaker/Endpoints/"
BAKE = 300  # seconds the alarms watch a new fleet before the old one goes
ERRORS = 5  # of the container, in a minute
SLOWEST = 60  # seconds: SageMaker's own limit for a whole answer


@dataclass(frozen=True, slots=True)
class Call:
    service: str  # as boto3 calls it
    operation: str  # as AWS calls it
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class Upload:
    what: str
    artifact: Artifact
    uri: str  # ends in /


@dataclass(frozen=True, slots=True)
class Resource:
    kind: str
    name: str
    create: Call
    read: Call
    found: str  # where the answer of `read` has it (JMESPath); nothing there: it does not exist
    delete: Call
    change: Call | None = None  # what makes it as wanted where it exists; None: it never changes


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


def stack(choices: Choices, deployment: Deployment, target: Artifact, drafter: Artifact, channel: bool = True) -> Stack:
    """`channel`: the drafter on a channel of its own. Without, both lie in the model's folder."""
    places = Places.of(choices.bucket, deployment.pair, target, drafter)
    uploads = (Upload("target", target, places.target), Upload("drafter", drafter, places.drafter))
    container = hub_container(deployment) if choices.from_hub else container_of(deployment, places, channel)
    if not choices.from_hub and target.vocabularies:
        container["Environment"][VOCABULARIES] = MODEL if channel else f"{MODEL}/target"
    variables = container["Environment"] | choices.variables
    check_environment(variables)
    container |= {"Image": choices.image, "Environment": variables}
    tags = [{"Key": "peagle:endpoint", "Value": choices.name}, {"Key": "peagle:pair", "Value": deployment.pair}]
    model = model_of(choices, container, tags)
    config = config_of(choices, model.name, tags)
    alarms = alarms_of(choices)
    endpoint = endpoint_of(choices, config.name, alarms, tags)
    scaling = scaling_of(choices.name, choices.autoscale) if choices.autoscale else ()
    resources = (model, config, *alarms, endpoint, *scaling)
    return Stack(choices.name, choices.region, () if choices.from_hub else uploads, resources)


def hub_container(deployment: Deployment) -> Parameters:
    return {"Environment": environment(deployment)}


def container_of(deployment: Deployment, places: Places, channel: bool) -> Parameters:
    if channel:
        there = replace(deployment, target=MODEL, drafter=CHANNEL_FOLDER)
        more = {"AdditionalModelDataSources": [{"ChannelName": CHANNEL, "S3DataSource": data(places.drafter)}]}
        return {"Environment": environment(there), "ModelDataSource": {"S3DataSource": data(places.target)}} | more
    below = {uri: f"{MODEL}/{uri.removeprefix(places.root).rstrip('/')}" for uri in (places.target, places.drafter)}
    there = replace(deployment, target=below[places.target], drafter=below[places.drafter])
    return {"Environment": environment(there), "ModelDataSource": {"S3DataSource": data(places.root)}}


def data(uri: str) -> Parameters:
    return {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}


def digest(parameters: Parameters) -> str:
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:DIGEST]


def model_of(choices: Choices, container: Parameters, tags: list[Parameters]) -> Resource:
    wanted = {
        "PrimaryContainer": container,
        "ExecutionRoleArn": choices.role,
        "EnableNetworkIsolation": choices.isolated,
        "Tags": tags,
    }
    name = f"{choices.name}-{digest(wanted)}"
    return sagemaker("model", "Model", name, {"ModelName": name} | wanted)


def config_of(choices: Choices, model: str, tags: list[Parameters]) -> Resource:
    variant = {
        "VariantName": VARIANT,
        "ModelName": model,
        "InstanceType": choices.instance,
        "InitialInstanceCount": choices.count,
        "ModelDataDownloadTimeoutInSeconds": choices.startup,
        "ContainerStartupHealthCheckTimeoutInSeconds": choices.startup,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    if choices.ami:
        variant["InferenceAmiVersion"] = choices.ami
    wanted = {"ProductionVariants": [variant], "Tags": tags}
    name = f"{choices.name}-{digest(wanted)}"
    return sagemaker("endpoint config", "EndpointConfig", name, {"EndpointConfigName": name} | wanted)


def endpoint_of(choices: Choices, config: str, alarms: tuple[Resource, ...], tags: list[Parameters]) -> Resource:
    named = {"EndpointName": choices.name, "EndpointConfigName": config}
    made = sagemaker("endpoint", "Endpoint", choices.name, named | {"Tags": tags})
    update = Call("sagemaker", "UpdateEndpoint", named | {
        "RetainAllVariantProperties": choices.autoscale is not None,  # as many instances as there are now
        "DeploymentConfig": deployment_config(alarms),
    })  # fmt: skip
    return replace(made, change=update)


def deployment_config(alarms: tuple[Resource, ...]) -> Parameters:
    """A new fleet beside the old one; all traffic to it; back to the old one if an alarm rings while both are there."""
    traffic = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": BAKE}
    return {
        "BlueGreenUpdatePolicy": {"TrafficRoutingConfiguration": traffic, "TerminationWaitInSeconds": 60},
        "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": alarm.name} for alarm in alarms]},
    }


def sagemaker(kind: str, noun: str, name: str, wanted: Parameters) -> Resource:
    named = {f"{noun}Name": name}
    create, read, delete = (Call("sagemaker", f"{verb}{noun}", named) for verb in ("Create", "Describe", "Delete"))
    return Resource(kind, name, replace(create, parameters=wanted), read, "@", delete)


def alarms_of(choices: Choices) -> tuple[Resource, ...]:
    slow = {"MetricName": "ModelLatency", "ExtendedStatistic": "p99", "Threshold": SLOWEST * 1e6}  # microseconds
    errors = {"MetricName": "Invocation5XXErrors", "Statistic": "Sum", "Threshold": float(ERRORS)}
    told = {
        "errors": errors | {"AlarmDescription": f"{ERRORS} answers or more a minute failed in the container"},
        "latency": slow | {"AlarmDescription": f"one answer in 100 takes {SLOWEST} s or more"},
    }
    return tuple(alarm(f"{choices.name}-{word}", wanted, choices) for word, wanted in told.items())


def alarm(name: str, wanted: Parameters, choices: Choices) -> Resource:
    put = Call("cloudwatch", "PutMetricAlarm", {
        "AlarmName": name, "Namespace": "AWS/SageMaker", **wanted,
        "Dimensions": [{"Name": "EndpointName", "Value": choices.name}, {"Name": "VariantName", "Value": VARIANT}],
        "Period": 60, "EvaluationPeriods": 2, "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "notBreaching", **({"AlarmActions": [choices.notify]} if choices.notify else {}),
    })  # fmt: skip
    read = Call("cloudwatch", "DescribeAlarms", {"AlarmNames": [name], "AlarmTypes": ["MetricAlarm"]})
    delete = Call("cloudwatch", "DeleteAlarms", {"AlarmNames": [name]})
    return Resource("alarm", name, put, read, "MetricAlarms[0]", delete, put)


def scaling_of(endpoint: str, wanted: Autoscale) -> tuple[Resource, Resource]:
    dimension = scaled(endpoint)
    limits = {"MinCapacity": wanted.least, "MaxCapacity": wanted.most}
    metric = {"PredefinedMetricType": "SageMakerVariantConcurrentRequestsPerModelHighResolution"}
    tracking = {
        "TargetValue": float(wanted.target), "PredefinedMetricSpecification": metric,
        "ScaleInCooldown": 300, "ScaleOutCooldown": 60,
    }  # fmt: skip
    policy = f"{endpoint}-concurrency"
    policed = {"PolicyName": policy, "PolicyType": "TargetTrackingScaling"}
    followed = {"TargetTrackingScalingPolicyConfiguration": tracking}
    target = Call("application-autoscaling", "RegisterScalableTarget", dimension | limits)
    put = Call("application-autoscaling", "PutScalingPolicy", policed | dimension | followed)
    places = {"ServiceNamespace": "sagemaker", "ScalableDimension": dimension["ScalableDimension"]}
    of = {"ResourceIds": [dimension["ResourceId"]]}
    named = {"PolicyNames": [policy], "ResourceId": dimension["ResourceId"]}
    return (
        Resource(
            "scalable target", dimension["ResourceId"], target,
            Call("application-autoscaling", "DescribeScalableTargets", places | of), "ScalableTargets[0]",
            Call("application-autoscaling", "DeregisterScalableTarget", dimension), target,
        ),
        Resource(
            "scaling policy", policy, put,
            Call("application-autoscaling", "DescribeScalingPolicies", places | named), "ScalingPolicies[0]",
            Call("application-autoscaling", "DeleteScalingPolicy", {"PolicyName": policy} | dimension), put,
        ),
    )  # fmt: skip


def scaled(endpoint: str) -> Parameters:
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{endpoint}/variant/{VARIANT}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
