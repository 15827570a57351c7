"""The alarms of an endpoint, which roll its updates back."""

from peagle.deploy.sagemaker.plan.choices import Choices
from peagle.deploy.sagemaker.resources.calls import VARIANT, Call, Parameters, Resource

ERRORS = 5  # of the container, in a minute
SLOWEST = 60  # seconds: SageMaker's own limit for a whole answer


def alarms_of(choices: Choices) -> tuple[Resource, ...]:
    slow = {
        "MetricName": "ModelLatency",
        "ExtendedStatistic": "p99",
        "Threshold": SLOWEST * 1e6,
    }  # microseconds
    errors = {"MetricName": "Invocation5XXErrors", "Statistic": "Sum", "Threshold": float(ERRORS)}
    by_errors, by_latency = alarm_names(choices.name)
    told = {
        by_errors: errors
        | {"AlarmDescription": f"{ERRORS} answers or more a minute failed in the container"},
        by_latency: slow | {"AlarmDescription": f"one answer in 100 takes {SLOWEST} s or more"},
    }
    return tuple(alarm(name, wanted, choices) for name, wanted in told.items())


def alarm_names(endpoint: str) -> tuple[str, str]:
    return f"{endpoint}-errors", f"{endpoint}-latency"


def alarm(name: str, wanted: Parameters, choices: Choices) -> Resource:
    put = Call(
        "cloudwatch",
        "PutMetricAlarm",
        {
            "AlarmName": name,
            "Namespace": "AWS/SageMaker",
            **wanted,
            "Dimensions": [
                {"Name": "EndpointName", "Value": choices.name},
                {"Name": "VariantName", "Value": VARIANT},
            ],
            "Period": 60,
            "EvaluationPeriods": 2,
            "ComparisonOperator": "GreaterThanOrEqualToThreshold",
            "TreatMissingData": "notBreaching",
            **({"AlarmActions": [choices.notify]} if choices.notify else {}),
        },
    )
    read = Call(
        "cloudwatch", "DescribeAlarms", {"AlarmNames": [name], "AlarmTypes": ["MetricAlarm"]}
    )
    delete = Call("cloudwatch", "DeleteAlarms", {"AlarmNames": [name]})
    return Resource("alarm", name, put, read, "MetricAlarms[0]", delete, put)
