import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from peagle.cli.application import err, warn
from peagle.cli.deployment.deploy import deploy_app
from peagle.cli.options import Json, K, Method
from peagle.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from peagle.deploy.plan import Plan
    from peagle.deploy.sagemaker.operate.apply import Done
    from peagle.deploy.sagemaker.operate.wait import Tell
    from peagle.deploy.sagemaker.plan.choices import Choices
    from peagle.deploy.sagemaker.resources.stack import Stack

FORMATS = ["json", "cloudformation", "terraform"]
Region = Annotated[
    str | None,
    typer.Option("--region", help="AWS's region.", envvar=["AWS_REGION", "AWS_DEFAULT_REGION"]),
]
Profile = Annotated[
    str | None, typer.Option("--profile", help="Of AWS's configuration.", envvar="AWS_PROFILE")
]


@deploy_app.command("sagemaker")
def sagemaker(
    pair: Annotated[
        str, typer.Argument(metavar="PAIR", help="The pair, or a target's folder (with --drafter).")
    ],
    role: Annotated[str, typer.Option(help="The ARN of the role SageMaker takes on.")],
    instance: Annotated[
        str | None,
        typer.Option(
            help="The type, like ml.g7e.2xlarge. Default: the pair's, if known.", show_default=False
        ),
    ] = None,
    region: Region = None,
    name: Annotated[
        str | None, typer.Option(help="The endpoint's. Default: peagle-PAIR.", show_default=False)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every call; call nobody.")
    ] = False,
    format: Annotated[
        str, typer.Option(help="Of the dry run: json, cloudformation or terraform.")
    ] = "json",
    autoscale: Annotated[
        tuple[int, int, float] | None,
        typer.Option(
            metavar="MIN MAX TARGET",
            help="Instances, and requests under way in each.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until it serves; what fails is taken back.")
    ] = False,
    bucket: Annotated[
        str | None,
        typer.Option(
            help="s3://BUCKET/PREFIX/ for weights. Default: SageMaker's own bucket.",
            show_default=False,
        ),
    ] = None,
    from_hub: Annotated[
        bool, typer.Option("--from-hub", help="The container fetches the weights itself.")
    ] = False,
    image: Annotated[
        str | None,
        typer.Option(help="The container. Default: AWS's vLLM.", metavar="URI", show_default=False),
    ] = None,
    k: K = None,
    method: Method = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Requests at once: chooses K, where it is known.", min=1, show_default=False
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its answer.", show_default=False)
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="A folder or a hub id, instead of the pair's.", show_default=False),
    ] = None,
    count: Annotated[int, typer.Option(help="Instances.")] = 1,
    gpus: Annotated[
        int | None,
        typer.Option(help="GPUs for tensor parallel. Default: the instance's.", show_default=False),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME=VALUE",
            help="More of the container's environment.",
            show_default=False,
        ),
    ] = None,
    isolated: Annotated[
        bool | None,
        typer.Option(
            "--isolated/--no-isolated",
            help="No network for the container. Default: unless --from-hub.",
            show_default=False,
        ),
    ] = None,
    ami: Annotated[
        str | None,
        typer.Option(
            help="InferenceAmiVersion. Default: what the image needs.", show_default=False
        ),
    ] = None,
    startup: Annotated[
        int, typer.Option("--startup-seconds", help="The container may take; as many the download.")
    ] = 1800,
    notify: Annotated[
        str | None, typer.Option(metavar="ARN", help="An SNS topic for alarms.", show_default=False)
    ] = None,
    upload_only: Annotated[
        bool, typer.Option("--upload-only", help="Only the weights, for a template.")
    ] = False,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Create or update a SageMaker endpoint. Run again it changes nothing; with other choices it updates, blue/green.

    Example: peagle deploy sagemaker gpt-oss-20b --role ARN --region us-west-2 --autoscale 1 4 8 --dry-run
    """
    from peagle.deploy.sagemaker.plan.choices import Autoscale

    if format not in FORMATS:
        raise UserError(
            f"unknown format {format!r}: use {', '.join(FORMATS)}.{did_you_mean(format, FORMATS)}"
        )
    given = {
        "bucket": bucket,
        "image": image,
        "ami": ami,
        "notify": notify,
        "instance": instance,
        "region": region,
        "name": name,
    }
    wanted = {key: value for key, value in given.items() if value} | {
        "role": role,
        "count": count,
        "startup": startup,
        "from_hub": from_hub,
        "isolated": not from_hub if isolated is None else isolated,
        "variables": parse_variables(variables or []),
        "autoscale": Autoscale(*autoscale) if autoscale else None,
    }
    asked = {
        "k": k,
        "concurrency": concurrency,
        "context": context,
        "drafter": drafter,
        "method": method,
    }
    choices, planned = decide(pair, wanted, asked, gpus)
    if dry_run:
        print(json.dumps(rendered(choices, planned, format), indent=2))
        return
    done = carry_out(choices, planned, profile, wait, upload_only, as_json)
    report(choices, done, upload_only, as_json)


def decide(
    name: str, choices: dict[str, Any], asked: dict[str, Any], gpus: int | None
) -> "tuple[Choices, Plan]":
    """Everything that can be wrong is found out here, before anybody is called."""
    from peagle.catalog import find_pair
    from peagle.deploy.plan import plan
    from peagle.deploy.sagemaker.plan.choices import Choices
    from peagle.deploy.sagemaker.plan.instances import instances
    from peagle.deploy.spec import dns_label

    known = find_pair(name)
    defaults = {"name": f"peagle-{dns_label(Path(known.name).name)}"}
    if known.production.instances:
        defaults["instance"] = known.production.instances[0]
    choices = defaults | choices
    if "instance" not in choices:
        raise UserError(f"--instance is missing, and the catalog knows no type for {name}")
    if "region" not in choices:
        raise UserError("--region is missing: give it, or set AWS_REGION")
    wanted = Choices(**choices)
    found = instances().get(wanted.instance)
    used = gpus or (found.gpus if found else 1)
    planned = plan(name, "sagemaker", vllm=wanted.vllm, choices={"gpus": used}, **asked)
    if wanted.from_hub and planned.deployment.local:
        raise UserError(
            f"target or drafter of {name} lie on this machine only: leave --from-hub out"
        )
    for note in notes_of(wanted, planned):
        warn(note)
    return wanted, planned


def notes_of(choices: "Choices", planned: "Plan") -> list[str]:
    from peagle.deploy.sagemaker.plan.artifact import target
    from peagle.deploy.sagemaker.plan.limits import check_memory
    from peagle.pull import target_folder

    notes = [*planned.deployment.notes, *check_memory(choices.instance, planned.deployment)]
    if choices.vllm is None:
        notes.append(
            f"the vLLM in {choices.image} is unknown: whether it serves the pair was not checked"
        )
    if (
        choices.isolated
        and "gpt-oss" in planned.deployment.target
        and not target(planned.pair).vocabularies
    ):
        notes.append(
            "gpt-oss fetches o200k_base.tiktoken when it starts, and without a network it cannot:"
            f" put the file into {target_folder(planned.pair)}, or use --no-isolated"
        )
    return notes


def parse_variables(words: list[str]) -> dict[str, str]:
    if strange := [word for word in words if "=" not in word]:
        raise UserError(f"--env {strange[0]!r}: write it like NAME=VALUE")
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def rendered(choices: "Choices", planned: "Plan", format: str) -> Any:
    from peagle.deploy.sagemaker.output.cloudformation import cloudformation
    from peagle.deploy.sagemaker.output.dry_run import steps
    from peagle.deploy.sagemaker.output.terraform import terraform
    from peagle.deploy.sagemaker.plan.artifact import drafter, target
    from peagle.deploy.sagemaker.resources.stack import stack

    weights = (first := target(planned.pair)), drafter(planned, first)
    for one in weights:
        if one.folder is None and not choices.from_hub and one.source.endswith(" at main"):
            warn(
                f"{one.source} is not on this machine: once it is, its commit takes the place of `main` in all names"
            )
    made = stack(choices, planned.deployment, *weights, channel=format != "cloudformation")
    return {"json": steps, "cloudformation": cloudformation, "terraform": terraform}[format](made)


def carry_out(
    choices: "Choices",
    planned: "Plan",
    profile: str | None,
    wait: bool,
    upload_only: bool,
    quiet: bool,
) -> "list[Done]":
    from peagle.deploy.sagemaker.operate.apply import Apply
    from peagle.deploy.sagemaker.operate.clients import Clients

    clients = Clients(choices.region, profile)
    assert clients.session  # no credentials: told before anything is fetched
    made = uploaded(choices, planned, clients, quiet)
    if upload_only:
        return []
    with spinner(quiet) as tell:
        return Apply(made, clients, wait, tell).run()


def uploaded(choices: "Choices", planned: "Plan", clients: Any, quiet: bool) -> "Stack":
    """The stack, its weights in S3."""
    from peagle.deploy.sagemaker.operate.clients import told
    from peagle.deploy.sagemaker.operate.upload import upload
    from peagle.deploy.sagemaker.plan.artifact import drafter, target
    from peagle.deploy.sagemaker.resources.stack import stack
    from peagle.progress import progress_bars

    with progress_bars(err, quiet=quiet) as progress:
        fetch = not choices.from_hub
        first = target(planned.pair, progress, fetch)
        made = stack(choices, planned.deployment, first, drafter(planned, first, progress, fetch))
        with told():
            for one in made.uploads:
                upload(clients["s3"], one, progress)
    return made


@contextmanager
def spinner(quiet: bool = False) -> "Iterator[Tell]":
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=err, transient=True, disable=quiet or not err.is_terminal
    ) as bar:
        task = bar.add_task("")
        yield lambda line: bar.update(task, description=escape(line))


def report(choices: "Choices", done: "list[Done]", upload_only: bool, as_json: bool) -> None:
    from peagle.deploy.sagemaker.resources.stack import LOGS

    if as_json:
        told = {
            "endpoint": choices.name,
            "region": choices.region,
            "log_group": LOGS + choices.name,
        }
        print(
            json.dumps(
                told
                | {
                    "steps": [
                        {"kind": one.kind, "name": one.name, "what": one.what} for one in done
                    ]
                }
            )
        )
        return
    for one in done:
        print(f"{one.what:9}  {one.kind} {one.name}")
    if upload_only:
        print(f"the weights are in {choices.bucket}")
        return
    if all(one.what == "unchanged" for one in done):
        print("nothing changed: all is as it was")
    print(f"next: peagle sagemaker status {choices.name} --region {choices.region}")
