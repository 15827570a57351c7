"""Autoscaling of an endpoint's instances by the concurrent requests of each."""

from peagle.deploy.sagemaker.plan.choices import Autoscale
from peagle.deploy.sagemaker.resources.calls import VARIANT, Call, Parameters, Resource

SERVICE = "application-autoscaling"
METRIC = "SageMakerVariantConcurrentRequestsPerModelHighResolution"
SCALE_IN_COOLDOWN_SECONDS = 300
SCALE_OUT_COOLDOWN_SECONDS = 60


def scaling_resources(endpoint: str, autoscale: Autoscale) -> tuple[Resource, Resource]:
    dimension = scalable_dimension(endpoint)
    target = scalable_target(dimension, autoscale)
    return target, scaling_policy(f"{endpoint}-concurrency", dimension, autoscale.target)


def scalable_target(dimension: Parameters, autoscale: Autoscale) -> Resource:
    limits = {"MinCapacity": autoscale.min_instances, "MaxCapacity": autoscale.max_instances}
    query = {
        "ServiceNamespace": "sagemaker",
        "ScalableDimension": dimension["ScalableDimension"],
        "ResourceIds": [dimension["ResourceId"]],
    }
    register = Call(SERVICE, "RegisterScalableTarget", dimension | limits)
    return Resource(
        kind="scalable target",
        name=dimension["ResourceId"],
        create=register,
        read=Call(SERVICE, "DescribeScalableTargets", query),
        result_path="ScalableTargets[0]",
        delete=Call(SERVICE, "DeregisterScalableTarget", dimension),
        update=register,
    )


def scaling_policy(name: str, dimension: Parameters, target: float) -> Resource:
    key = {"PolicyName": name} | dimension
    tracking = {
        "TargetValue": float(target),
        "PredefinedMetricSpecification": {"PredefinedMetricType": METRIC},
        "ScaleInCooldown": SCALE_IN_COOLDOWN_SECONDS,
        "ScaleOutCooldown": SCALE_OUT_COOLDOWN_SECONDS,
    }
    policy = {
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": tracking,
    }
    put = Call(SERVICE, "PutScalingPolicy", key | policy)
    return Resource(
        kind="scaling policy",
        name=name,
        create=put,
        read=Call(SERVICE, "DescribeScalingPolicies", dimension | {"PolicyNames": [name]}),
        result_path="ScalingPolicies[0]",
        delete=Call(SERVICE, "DeleteScalingPolicy", key),
        update=put,
    )


def scalable_dimension(endpoint: str) -> Parameters:
    """The parameters with which every call of this service names what it scales."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{endpoint}/variant/{VARIANT}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
