"""SageMaker's limits, checked here: fake AWS libraries do not, and AWS does so only after the upload."""

import re
from collections.abc import Mapping

from peagle.deploy.sagemaker.plan.instances import instances, smallest
from peagle.deploy.spec import Deployment
from peagle.errors import UserError, did_you_mean

VALUE_BYTES = 1024
TOGETHER_BYTES = 32 * 1024
ENTRIES = 100
NAME = 63
DIGEST = 10  # characters behind an endpoint's name, in those of its models and configs


def check_name(name: str) -> str:
    longest = NAME - DIGEST - 1
    if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", name) or len(name) > longest:
        raise UserError(
            f"--name {name!r} cannot be an endpoint's: use a-z, A-Z, 0-9 and dashes, at most {longest}"
        )
    return name


def check_arn(arn: str, option: str, service: str, begins: str) -> None:
    region = "" if service == "iam" else r"[a-z0-9-]+"
    if not re.fullmatch(
        rf"arn:aws[a-z-]*:{service}:{region}:\d{{12}}:{begins}[\w+=,.@/-]+", arn, re.ASCII
    ):
        example = (
            f"arn:aws:{service}:{'' if service == 'iam' else 'us-west-2'}:123456789012:{begins}NAME"
        )
        raise UserError(f"{option} {arn!r} is no ARN of that kind: give one like {example}")


def check_prefix(uri: str) -> str:
    if (
        not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/([\w!.*'()-]+/)*", uri, re.ASCII)
        or len(uri) > 900
    ):
        raise UserError(f"{uri!r} is no prefix in S3: give one like s3://BUCKET/peagle/")
    return uri


def check_environment(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name):
            raise UserError(f"{name!r} cannot be a variable's name: use letters, digits and _")
        if len(value.encode()) > VALUE_BYTES:
            raise UserError(
                f"{name} has {len(value.encode())} bytes: SageMaker allows {VALUE_BYTES} per value"
            )
        if "\n" in value:
            raise UserError(
                f"{name} has more than one line: older containers break there, write it in one"
            )
    if len(variables) > ENTRIES:
        raise UserError(f"the environment has {len(variables)} entries: SageMaker allows {ENTRIES}")
    together = sum(len(name.encode()) + len(value.encode()) for name, value in variables.items())
    if together > TOGETHER_BYTES:
        raise UserError(
            f"the environment has {together} bytes: SageMaker allows {TOGETHER_BYTES} together"
        )


def check_memory(type: str, deployment: Deployment) -> list[str]:
    """What should be known about memory; an instance that cannot hold the pair is refused."""
    found = instances().get(type)
    if found is None:
        close = did_you_mean(type, list(instances()))
        return [f"the GPUs of {type} are not in our table: its memory was not checked.{close}"]
    if deployment.gpus > found.gpus:
        raise UserError(f"--gpus is {deployment.gpus}, but {type} has {found.gpus}")
    need = deployment.need_gb or deployment.weights_gb
    if need is None:
        return [f"what {deployment.pair} needs is unknown: the memory of {type} was not checked"]
    has = found.usable_gb * deployment.gpus / found.gpus
    if need > has:
        enough = smallest(need)
        fix = (
            f"use {enough}, or a shorter --context"
            if enough
            else "no type we know holds it: use a shorter --context"
        )
        raise UserError(
            f"{deployment.pair} needs {need} GB, vLLM gets {has:.1f} GB of {type}'s GPUs: {fix}"
        )
    return []
