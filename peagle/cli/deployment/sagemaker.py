import json
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from peagle.cli.application import CommandGroup, app, err, out
from peagle.cli.deployment.options import EndpointArgument, Profile, Region
from peagle.cli.deployment.spinner import spinner
from peagle.cli.deployment.verify import (
    exit_unless_proven,
    print_verification,
    verify_sagemaker,
)
from peagle.cli.options import Json, MaxTokens
from peagle.errors import UserError

sagemaker_app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(sagemaker_app, name="sagemaker")
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@sagemaker_app.callback()
def sagemaker() -> None:
    """Operate an endpoint that `peagle deploy sagemaker` created."""


@sagemaker_app.command()
def status(
    name: EndpointArgument,
    verify: Annotated[
        bool, typer.Option("--verify", help="Send a few prompts: does the endpoint speculate?")
    ] = False,
    region: Region = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Show the status of an endpoint: instances, models, alarms, autoscaling.

    Example: peagle sagemaker status peagle-gpt-oss-20b --region us-west-2
    """
    from peagle.deploy.sagemaker.operate.clients import Clients, translate_aws_errors
    from peagle.deploy.sagemaker.operate.status import endpoint_status

    clients = Clients(region, profile)
    with translate_aws_errors():
        summary = endpoint_status(clients, name)
    if not as_json:
        print_status(summary)
    verification = verify_sagemaker(clients, name, as_json) if verify else None
    if as_json:
        added = {"verification": verification.to_json()} if verification else {}
        print(json.dumps(summary | added))
    elif verification:
        print_verification(verification)
    exit_unless_proven(verification)


def print_status(summary: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    for key, value in summary.items():
        if value not in (None, [], {}):
            text = value if isinstance(value, str) else json.dumps(value)
            table.add_row(key.replace("_", " "), text)
    out.print(table)


@sagemaker_app.command()
def invoke(
    name: EndpointArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The user's message. Without it, give --body.", show_default=False),
    ] = None,
    body: Annotated[
        Path | None,
        typer.Option(
            help="A request as JSON instead of a prompt; - reads it from stdin.",
            show_default=False,
        ),
    ] = None,
    max_tokens: MaxTokens = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print the answer as it arrives.")
    ] = True,
    region: Region = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Send a request to an endpoint and stream the answer.

    Example: peagle sagemaker invoke peagle-gpt-oss-20b "Why is the sky blue?" --region us-west-2
    """
    from peagle.deploy.sagemaker.operate.clients import Clients
    from peagle.deploy.sagemaker.operate.invoke import invoke, invoke_stream, response_text

    request = build_request(prompt, body, max_tokens, temperature)
    client = Clients(region, profile)["sagemaker-runtime"]
    if not stream:
        answer = invoke(client, name, request)
        print(json.dumps(answer, ensure_ascii=False) if as_json else response_text(answer))
        return
    for chunk in invoke_stream(client, name, request):
        text = json.dumps(chunk, ensure_ascii=False) + "\n" if as_json else response_text(chunk)
        sys.stdout.write(text)
        sys.stdout.flush()
    if not as_json:
        print()


def build_request(
    prompt: str | None, body: Path | None, max_tokens: int, temperature: float
) -> dict[str, Any]:
    if (prompt is None) == (body is None):
        raise UserError("give either a prompt or --body FILE")
    if body is None:
        messages = [{"role": "user", "content": prompt}]
        return {"messages": messages, "max_tokens": max_tokens, "temperature": temperature}
    text = sys.stdin.read() if str(body) == "-" else body.expanduser().read_text()
    try:
        request = json.loads(text)
    except ValueError as error:
        raise UserError(f"{body} is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise UserError(f"{body} is not a request: write an object with messages or prompt")
    return request


@sagemaker_app.command()
def logs(
    name: EndpointArgument,
    since: Annotated[
        str, typer.Option(help="Age of the oldest line to print: 30s, 10m, 2h, 1d.")
    ] = "10m",
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Continue with new lines until Ctrl-C.")
    ] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Print the log of the containers.

    Example: peagle sagemaker logs peagle-gpt-oss-20b --since 1h --follow --region us-west-2
    """
    from peagle.deploy.sagemaker.operate.clients import Clients, translate_aws_errors
    from peagle.deploy.sagemaker.operate.logs import log_events

    since_ms = int((time.time() - parse_duration(since)) * 1000)
    client = Clients(region, profile)["logs"]
    with translate_aws_errors():
        for event in log_events(client, name, since_ms, follow):
            timestamp = datetime.fromtimestamp(event["timestamp"] / 1000, UTC)
            print(f"{timestamp:%Y-%m-%d %H:%M:%S} {event['message'].rstrip()}", flush=True)


def parse_duration(text: str) -> int:
    """ "10m" -> 600 seconds."""
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if not match:
        raise UserError(f"--since {text!r} is not a duration: write it like 30s, 10m, 2h or 1d")
    return int(match[1]) * UNIT_SECONDS[match[2]]


@sagemaker_app.command()
def delete(
    name: EndpointArgument,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights", help="Delete its weights in S3 too, where no other model reads them."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Delete an endpoint with its configs, models, alarms and autoscaling.

    Example: peagle sagemaker delete peagle-gpt-oss-20b --region us-west-2
    """
    from peagle.deploy.sagemaker.operate import delete as operation
    from peagle.deploy.sagemaker.operate.clients import Clients, translate_aws_errors

    clients = Clients(region, profile)
    with translate_aws_errors():
        deletions = operation.find_deletions(clients, name)
        prefixes = operation.exclusive_prefixes(clients, name) if weights else []
    if not deletions:
        raise UserError(
            f"there is nothing of an endpoint {name!r} in {clients.session.region_name}:"
            " check --region"
        )
    for line in [*(deletion.description for deletion in deletions), *prefixes]:
        print(line)
    if not yes and not typer.confirm("Delete all of this?", err=True):
        raise typer.Exit(1)
    with translate_aws_errors(), spinner() as on_status:
        operation.delete(clients, name, deletions, on_status)
        count = sum(operation.delete_prefix(clients["s3"], prefix) for prefix in prefixes)
    objects = f", and {count} objects in S3" if prefixes else ""
    err.print(f"deleted{objects}", highlight=False)
