"""Checks of SageMaker's limits.

They run locally because AWS checks them only after the upload, and fake AWS libraries never.
"""

import re
from collections.abc import Mapping

from peagle.deploy.sagemaker.plan.instances import instance_types, smallest_instance
from peagle.deploy.spec import Deployment
from peagle.errors import UserError, did_you_mean

MAX_VALUE_BYTES = 1024
MAX_ENVIRONMENT_BYTES = 32 * 1024
MAX_VARIABLES = 100
MAX_NAME_LENGTH = 63
MAX_S3_URI_LENGTH = 900
# Models and configs are named after their endpoint: NAME-DIGEST.
DIGEST_LENGTH = 10
S3_PREFIX = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/([\w!.*'()-]+/)*", re.ASCII)


def check_name(name: str) -> str:
    max_length = MAX_NAME_LENGTH - DIGEST_LENGTH - 1
    if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", name) or len(name) > max_length:
        raise UserError(
            f"`name` {name!r} is not a valid endpoint name:"
            f" use a-z, A-Z, 0-9 and dashes, at most {max_length} characters"
        )
    return name


def check_arn(arn: str, argument: str, service: str, resource_prefix: str) -> None:
    region = "" if service == "iam" else r"[a-z0-9-]+"
    pattern = rf"arn:aws[a-z-]*:{service}:{region}:\d{{12}}:{resource_prefix}[\w+=,.@/-]+"
    if not re.fullmatch(pattern, arn, re.ASCII):
        example_region = "" if service == "iam" else "us-west-2"
        example = f"arn:aws:{service}:{example_region}:123456789012:{resource_prefix}NAME"
        raise UserError(f"`{argument}` {arn!r} is not a valid ARN: give one like {example}")


def check_s3_prefix(uri: str) -> str:
    if not S3_PREFIX.fullmatch(uri) or len(uri) > MAX_S3_URI_LENGTH:
        raise UserError(f"{uri!r} is not a valid S3 prefix: give one like s3://BUCKET/peagle/")
    return uri


def check_environment(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        check_variable(name, value)
    if len(variables) > MAX_VARIABLES:
        raise UserError(
            f"the environment has {len(variables)} entries: SageMaker allows {MAX_VARIABLES}"
        )
    total_bytes = sum(len(name.encode()) + len(value.encode()) for name, value in variables.items())
    if total_bytes > MAX_ENVIRONMENT_BYTES:
        raise UserError(
            f"the environment has {total_bytes} bytes:"
            f" SageMaker allows {MAX_ENVIRONMENT_BYTES} together"
        )


def check_variable(name: str, value: str) -> None:
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name):
        raise UserError(f"{name!r} is not a valid variable name: use letters, digits and _")
    if len(value.encode()) > MAX_VALUE_BYTES:
        raise UserError(
            f"{name} has {len(value.encode())} bytes: SageMaker allows {MAX_VALUE_BYTES} per value"
        )
    if "\n" in value:
        raise UserError(
            f"{name} has more than one line, which older containers do not support:"
            " write it on one line"
        )


def check_memory(instance: str, deployment: Deployment) -> list[str]:
    """Refuse an instance without enough memory; return notes about what was not checked."""
    known = instance_types().get(instance)
    if known is None:
        hint = did_you_mean(instance, list(instance_types()))
        return [
            f"the GPUs of {instance} are not in the table of instance types:"
            f" its memory was not checked.{hint}"
        ]
    if deployment.gpus > known.gpus:
        raise UserError(f"`gpus` is {deployment.gpus}, but {instance} has {known.gpus}")
    need_gb = deployment.need_gb or deployment.weights_gb
    if need_gb is None:
        return [
            f"the memory that {deployment.pair} needs is unknown:"
            f" the memory of {instance} was not checked"
        ]
    usable_gb = known.usable_gb * deployment.gpus / known.gpus
    if need_gb > usable_gb:
        sufficient = smallest_instance(need_gb)
        fix = (
            f"use {sufficient}, or a shorter `context`"
            if sufficient
            else "no known type has enough: use a shorter `context`"
        )
        raise UserError(
            f"{deployment.pair} needs {need_gb} GB, but vLLM gets {usable_gb:.1f} GB"
            f" of the GPUs of {instance}: {fix}"
        )
    return []
