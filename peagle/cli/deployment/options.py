"""Options of `peagle deploy` and `peagle sagemaker`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.errors import UserError, did_you_mean

FORMATS = ["json", "cloudformation", "terraform"]


def check_format(name: str) -> str:
    if name not in FORMATS:
        raise UserError(
            f"unknown format {name!r}: use {', '.join(FORMATS)}.{did_you_mean(name, FORMATS)}"
        )
    return name


def optional(*names: str, help: str, metavar: str | None = None) -> Any:
    """An option without a default."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=False)


# All deployments
PairName = Annotated[
    str, typer.Argument(metavar="PAIR", help="The pair, or the folder of a target with --drafter.")
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        help="Expected concurrent requests: chooses K, where the best K is known.",
        min=1,
        show_default=False,
    ),
]
Context = Annotated[
    int | None, optional("--context", help="Maximum tokens of a prompt and its answer.")
]

# Files: peagle deploy vllm, compose, ...
OutFolder = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder to write the files to.")
]
FileDrafter = Annotated[
    str | None,
    optional(
        "--drafter",
        help="A hub id, or a folder, which is exported to DIR/drafter. Default: the pair's.",
    ),
]
ReplicaGpus = Annotated[int, typer.Option("--gpus", help="GPUs of each replica (tensor parallel).")]
GpuType = Annotated[str | None, optional("--gpu", help="GPU type, in the platform's spelling.")]
Replicas = Annotated[int, typer.Option("--replicas", help="Number of replicas.")]
Port = Annotated[int, typer.Option("--port", help="Port of the endpoint.")]
DeploymentName = Annotated[
    str | None, optional("--name", help="Name of the deployment. Default: peagle-PAIR.")
]
ServedModelName = Annotated[
    str | None, optional("--served-model-name", help="Name of the model in requests.")
]
VllmVersion = Annotated[str | None, optional("--vllm", help="Version of vLLM.")]
VllmImage = Annotated[
    str | None, optional("--image", help="An image with vLLM, instead of vllm/vllm-openai.")
]
Learn = Annotated[
    bool,
    typer.Option(
        "--learn",
        help="Serve with `peagle serve --learn` in --image instead of vLLM: compose, kubernetes.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that differ.")]

# AWS
Region = Annotated[
    str | None,
    typer.Option("--region", help="AWS region.", envvar=["AWS_REGION", "AWS_DEFAULT_REGION"]),
]
Profile = Annotated[
    str | None,
    typer.Option("--profile", help="Profile of the AWS configuration.", envvar="AWS_PROFILE"),
]
EndpointArgument = Annotated[str, typer.Argument(metavar="NAME", help="The endpoint.")]

# peagle deploy sagemaker
Role = Annotated[
    str, typer.Option("--role", help="ARN of the role that SageMaker assumes for the endpoint.")
]
Instance = Annotated[
    str | None,
    optional(
        "--instance",
        help="Instance type, like ml.g7e.2xlarge. Default: the pair's, where known.",
    ),
]
EndpointName = Annotated[
    str | None, optional("--name", help="Name of the endpoint. Default: peagle-PAIR.")
]
EndpointLearn = Annotated[
    bool,
    typer.Option(
        "--learn", help="Learn from answers: needs an --image with `peagle serve`, and one GPU."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print every call instead of calling AWS.")]
OutputFormat = Annotated[
    str,
    typer.Option(
        "--format",
        help="Format of the dry run: json, cloudformation or terraform.",
        callback=check_format,
    ),
]
AutoscaleLimits = Annotated[
    tuple[int, int, float] | None,
    optional(
        "--autoscale",
        metavar="MIN MAX TARGET",
        help="Number of instances, and concurrent requests of each.",
    ),
]
Wait = Annotated[
    bool,
    typer.Option("--wait", help="Wait until the endpoint serves; roll back if it fails."),
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Wait, then send a few prompts: does the endpoint speculate?"),
]
Bucket = Annotated[
    str | None,
    optional(
        "--bucket", help="s3://BUCKET/PREFIX/ for the weights. Default: SageMaker's own bucket."
    ),
]
BucketOwner = Annotated[
    str | None,
    optional(
        "--bucket-owner",
        metavar="ACCOUNT",
        help="Account that must own the bucket. Default: the account of the credentials.",
    ),
]
FromHub = Annotated[
    bool, typer.Option("--from-hub", help="The container downloads the weights itself.")
]
ContainerImage = Annotated[
    str | None,
    optional("--image", metavar="URI", help="Image of the container. Default: AWS's vLLM image."),
]
EndpointDrafter = Annotated[
    str | None, optional("--drafter", help="A folder or a hub id, instead of the pair's drafter.")
]
InstanceCount = Annotated[int, typer.Option("--count", help="Number of instances.")]
InstanceGpus = Annotated[
    int | None,
    optional("--gpus", help="GPUs for tensor parallel. Default: all of the instance."),
]
Variables = Annotated[
    list[str] | None,
    optional(
        "--env", metavar="NAME=VALUE", help="Additional environment variable of the container."
    ),
]
Secrets = Annotated[
    list[str] | None,
    optional(
        "--secret",
        metavar="NAME[=@FILE]",
        help="The same, with the value from this environment or from a file. Never printed.",
    ),
]
PublicVariables = Annotated[
    list[str] | None,
    optional(
        "--public",
        metavar="NAME",
        help="Print the value of this variable in dry runs, like those of known options.",
    ),
]
Isolated = Annotated[
    bool | None,
    optional(
        "--isolated/--no-isolated",
        help="Run the container without a network. Default: on, except with --from-hub.",
    ),
]
Ami = Annotated[
    str | None, optional("--ami", help="InferenceAmiVersion. Default: the one the image needs.")
]
StartupSeconds = Annotated[
    int,
    typer.Option(
        "--startup-seconds", help="Timeout of the container's start, and of the download."
    ),
]
Notify = Annotated[
    str | None, optional("--notify", metavar="ARN", help="SNS topic that the alarms notify.")
]
UploadOnly = Annotated[
    bool, typer.Option("--upload-only", help="Upload only the weights, for a template.")
]
