"""The alarms of an endpoint; during an update they trigger its rollback."""

from peagle.deploy.sagemaker.plan.choices import EndpointSettings
from peagle.deploy.sagemaker.resources.calls import VARIANT, Call, Parameters, Resource

ERRORS_PER_MINUTE = 5
LATENCY_SECONDS = 60  # SageMaker's own limit for a whole response


def alarm_resources(settings: EndpointSettings) -> tuple[Resource, ...]:
    errors_name, latency_name = alarm_names(settings.name)
    errors = {
        "MetricName": "Invocation5XXErrors",
        "Statistic": "Sum",
        "Threshold": float(ERRORS_PER_MINUTE),
        "AlarmDescription": (
            f"{ERRORS_PER_MINUTE} answers or more a minute failed in the container"
        ),
    }
    latency = {
        "MetricName": "ModelLatency",
        "ExtendedStatistic": "p99",
        "Threshold": LATENCY_SECONDS * 1e6,  # in microseconds
        "AlarmDescription": f"one answer in 100 takes {LATENCY_SECONDS} s or more",
    }
    return (
        alarm_resource(errors_name, errors, settings),
        alarm_resource(latency_name, latency, settings),
    )


def alarm_names(endpoint: str) -> tuple[str, str]:
    """The names of the errors alarm and of the latency alarm."""
    return f"{endpoint}-errors", f"{endpoint}-latency"


def alarm_resource(name: str, metric: Parameters, settings: EndpointSettings) -> Resource:
    parameters = {
        "AlarmName": name,
        "Namespace": "AWS/SageMaker",
        **metric,
        "Dimensions": [
            {"Name": "EndpointName", "Value": settings.name},
            {"Name": "VariantName", "Value": VARIANT},
        ],
        "Period": 60,
        "EvaluationPeriods": 2,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "notBreaching",
        **({"AlarmActions": [settings.notify]} if settings.notify else {}),
    }
    put = Call("cloudwatch", "PutMetricAlarm", parameters)
    query = {"AlarmNames": [name], "AlarmTypes": ["MetricAlarm"]}
    return Resource(
        kind="alarm",
        name=name,
        create=put,
        read=Call("cloudwatch", "DescribeAlarms", query),
        result_path="MetricAlarms[0]",
        delete=Call("cloudwatch", "DeleteAlarms", {"AlarmNames": [name]}),
        update=put,
    )
