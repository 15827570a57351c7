"""Autoscaling of an endpoint's instances, by the requests under way in each."""

from peagle.deploy.sagemaker.plan.choices import Autoscale
from peagle.deploy.sagemaker.resources.calls import VARIANT, Call, Parameters, Resource

SERVICE = "application-autoscaling"
METRIC = "SageMakerVariantConcurrentRequestsPerModelHighResolution"


def scaling_of(endpoint: str, wanted: Autoscale) -> tuple[Resource, Resource]:
    dimension = scaled(endpoint)
    of = {"ServiceNamespace": "sagemaker", "ScalableDimension": dimension["ScalableDimension"]}
    one = {"ResourceIds": [dimension["ResourceId"]]}
    limits = {"MinCapacity": wanted.least, "MaxCapacity": wanted.most}
    register = Call(SERVICE, "RegisterScalableTarget", dimension | limits)
    read = Call(SERVICE, "DescribeScalableTargets", of | one)
    delete = Call(SERVICE, "DeregisterScalableTarget", dimension)
    target = Resource(
        "scalable target",
        dimension["ResourceId"],
        register,
        read,
        "ScalableTargets[0]",
        delete,
        register,
    )
    return target, policy_of(f"{endpoint}-concurrency", dimension, wanted.target)


def policy_of(name: str, dimension: Parameters, target: float) -> Resource:
    named = {"PolicyName": name} | dimension
    tracking = {
        "TargetValue": float(target),
        "PredefinedMetricSpecification": {"PredefinedMetricType": METRIC},
        "ScaleInCooldown": 300,
        "ScaleOutCooldown": 60,
    }
    how = {
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": tracking,
    }
    put = Call(SERVICE, "PutScalingPolicy", named | how)
    read = Call(SERVICE, "DescribeScalingPolicies", dimension | {"PolicyNames": [name]})
    delete = Call(SERVICE, "DeleteScalingPolicy", named)
    return Resource("scaling policy", name, put, read, "ScalingPolicies[0]", delete, put)


def scaled(endpoint: str) -> Parameters:
    """What is scaled: the dimension every call of this service names."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{endpoint}/variant/{VARIANT}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
