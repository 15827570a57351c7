import json
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from peagle.cli.application import app, err, out
from peagle.cli.deployment.deploy_sagemaker import Profile, Region, spinner
from peagle.cli.options import Json, MaxTokens
from peagle.errors import UserError

sagemaker_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(sagemaker_app, name="sagemaker")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The endpoint.")]
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@sagemaker_app.callback()
def sagemaker() -> None:
    """Look after an endpoint that `peagle deploy sagemaker` made."""


@sagemaker_app.command()
def status(
    name: Name, region: Region = None, profile: Profile = None, as_json: Json = False
) -> None:
    """Tell where an endpoint stands: status, instances, what it runs, alarms, scaling.

    Example: peagle sagemaker status peagle-gpt-oss-20b --region us-west-2
    """
    from peagle.deploy.sagemaker.operate.clients import Clients, told
    from peagle.deploy.sagemaker.operate.status import status as look

    clients = Clients(region, profile)
    with told():
        found = look(clients, name)
    if as_json:
        print(json.dumps(found))
        return
    table = Table(show_header=False, box=None)
    for key, value in found.items():
        if value not in (None, [], {}):
            table.add_row(
                key.replace("_", " "), value if isinstance(value, str) else json.dumps(value)
            )
    out.print(table)


@sagemaker_app.command()
def invoke(
    name: Name,
    prompt: Annotated[
        str | None, typer.Argument(help="A user's words. Without: --body.", show_default=False)
    ] = None,
    body: Annotated[
        Path | None,
        typer.Option(
            help="A request as JSON, instead of a prompt; - reads it from stdin.",
            show_default=False,
        ),
    ] = None,
    max_tokens: MaxTokens = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print the answer as it comes.")
    ] = True,
    region: Region = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Ask an endpoint, streamed.

    Example: peagle sagemaker invoke peagle-gpt-oss-20b "Why is the sky blue?" --region us-west-2
    """
    from peagle.deploy.sagemaker.operate.clients import Clients
    from peagle.deploy.sagemaker.operate.invoke import streamed, text_of, whole

    request = request_of(prompt, body, max_tokens, temperature)
    client = Clients(region, profile)["sagemaker-runtime"]
    if not stream:
        answer = whole(client, name, request)
        print(json.dumps(answer, ensure_ascii=False) if as_json else text_of(answer))
        return
    for chunk in streamed(client, name, request):
        text = json.dumps(chunk, ensure_ascii=False) + "\n" if as_json else text_of(chunk)
        sys.stdout.write(text)
        sys.stdout.flush()
    if not as_json:
        print()


def request_of(
    prompt: str | None, body: Path | None, max_tokens: int, temperature: float
) -> dict[str, Any]:
    if (prompt is None) == (body is None):
        raise UserError("give either a prompt or --body FILE")
    if body is None:
        messages = [{"role": "user", "content": prompt}]
        return {"messages": messages, "max_tokens": max_tokens, "temperature": temperature}
    text = sys.stdin.read() if str(body) == "-" else body.expanduser().read_text()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"{body} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{body} is no request: write an object with messages or prompt")
    return found


@sagemaker_app.command()
def logs(
    name: Name,
    since: Annotated[str, typer.Option(help="How far back: 30s, 10m, 2h, 1d.")] = "10m",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on, until Ctrl-C.")] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Print what the containers write.

    Example: peagle sagemaker logs peagle-gpt-oss-20b --since 1h --follow --region us-west-2
    """
    from peagle.deploy.sagemaker.operate.clients import Clients, told
    from peagle.deploy.sagemaker.operate.logs import events

    begin = int((time.time() - seconds(since)) * 1000)
    client = Clients(region, profile)["logs"]
    with told():
        for event in events(client, name, begin, follow):
            when = datetime.fromtimestamp(event["timestamp"] / 1000, UTC)
            print(f"{when:%Y-%m-%d %H:%M:%S} {event['message'].rstrip()}", flush=True)


def seconds(text: str) -> int:
    found = re.fullmatch(r"(\d+)([smhd])", text)
    if not found:
        raise UserError(f"--since {text!r}: write it like 30s, 10m, 2h or 1d")
    return int(found[1]) * UNITS[found[2]]


@sagemaker_app.command()
def delete(
    name: Name,
    weights: Annotated[
        bool,
        typer.Option("--weights", help="Its weights in S3 too, where no other model reads them."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Delete an endpoint with its configs, models, alarms and scaling.

    Example: peagle sagemaker delete peagle-gpt-oss-20b --region us-west-2
    """
    from peagle.deploy.sagemaker.operate.clients import Clients, told
    from peagle.deploy.sagemaker.operate.delete import belongings, empty
    from peagle.deploy.sagemaker.operate.delete import delete as remove
    from peagle.deploy.sagemaker.operate.delete import weights as prefixes

    clients = Clients(region, profile)
    with told():
        found = belongings(clients, name)
        places = prefixes(clients, name) if weights else []
    if not found:
        raise UserError(
            f"there is nothing of an endpoint {name!r} in {clients.session.region_name}: check --region"
        )
    for what in [*(what for what, _ in found), *places]:
        print(what)
    if not yes and not typer.confirm("Delete all of this?", err=True):
        raise typer.Exit(1)
    with told(), spinner() as tell:
        remove(clients, name, found, tell)
        count = sum(empty(clients["s3"], place) for place in places)
    err.print(f"deleted{f', and {count} objects in S3' if places else ''}", highlight=False)
