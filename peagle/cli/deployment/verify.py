import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from peagle.cli.application import app, out
from peagle.cli.deployment.options import Profile, Region, optional
from peagle.cli.deployment.spinner import spinner
from peagle.cli.measurement.bench_options import ApiKey, ServedModel
from peagle.cli.options import Json, MaxTokens
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.sagemaker.operate.clients import Clients
    from peagle.deploy.verify import Endpoint, Verification

SAGEMAKER_SCHEME = "sagemaker://"
DEFAULT_TOKENS = 128  # of each answer
MIN_TOKENS = 8
COLORS = {"speculating": "green", "not speculating": "red", "unproven": "yellow"}


@app.command()
def verify(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="http://HOST:PORT, or sagemaker://NAME.")
    ],
    reference: Annotated[
        str | None,
        optional(
            "--reference",
            help="Compare with the answers of this server: the same target and key, no drafter.",
        ),
    ] = None,
    model: ServedModel = None,
    api_key: ApiKey = None,
    max_tokens: MaxTokens = DEFAULT_TOKENS,
    region: Region = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Prove that a live endpoint speculates: peagle serve, vLLM or SageMaker.

    Exit code 0: proven; 1: it does not speculate, its answers differ from those without drafts,
    or there is no proof; 2: wrong input, or no answer.

    Example: peagle verify http://localhost:8000 --reference http://localhost:8001
    """
    if max_tokens < MIN_TOKENS:
        raise UserError(
            f"--max-tokens {max_tokens} is too few to see drafts: use {MIN_TOKENS} or more"
        )
    endpoint = open_endpoint(url, model, api_key, region, profile)
    other = None
    if reference is not None:
        other = open_endpoint(reference, None, api_key, region, profile)
    result = verify_endpoint(endpoint, max_tokens, other, as_json)
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        print_verification(result)
    exit_unless_proven(result)


def open_endpoint(
    url: str,
    model: str | None,
    api_key: str | None,
    region: str | None,
    profile: str | None,
) -> "Endpoint":
    if not url.startswith(SAGEMAKER_SCHEME):
        from peagle.deploy.verify.http_endpoint import HttpEndpoint

        return HttpEndpoint(url, model, api_key)
    from peagle.deploy.sagemaker.operate.clients import Clients
    from peagle.deploy.sagemaker.operate.verify import SageMakerEndpoint

    name = url.removeprefix(SAGEMAKER_SCHEME).strip("/")
    if not name:
        raise UserError("sagemaker:// has no name: write it like sagemaker://peagle-gpt-oss-20b")
    return SageMakerEndpoint(Clients(region, profile), name)


def verify_endpoint(
    endpoint: "Endpoint", max_tokens: int, reference: "Endpoint | None", quiet: bool
) -> "Verification":
    from peagle.deploy.verify import verify

    with spinner(quiet) as on_status:
        on_status(f"asking {endpoint.name}")
        return verify(endpoint, max_tokens, reference)


def verify_sagemaker(clients: "Clients", name: str, quiet: bool) -> "Verification":
    from peagle.deploy.sagemaker.operate.verify import SageMakerEndpoint

    return verify_endpoint(SageMakerEndpoint(clients, name), DEFAULT_TOKENS, None, quiet)


def exit_unless_proven(verification: "Verification | None") -> None:
    if verification is not None and not verification.proven:
        raise typer.Exit(1)


def print_verification(result: "Verification") -> None:
    verdict = f"[bold {COLORS[result.verdict]}]{result.verdict}[/]"
    comparison = result.comparison
    equal = None
    if comparison is not None:
        equal = f"{comparison.equal} of {comparison.compared}; without drafts: {comparison.without}"
    rows: list[tuple[str, object]] = [
        ("endpoint", f"{result.endpoint} ({result.kind})"),
        ("model", result.model),
        ("evidence", result.evidence),
        ("acceptance length", result.acceptance_length),
        ("drafts", result.drafts),
        ("accepted tokens", result.accepted_tokens),
        ("tokens/s", f"{result.tokens_per_second:,} ({result.tokens} tokens)"),
        ("equal answers", equal),
        ("cause", result.cause),
        ("fix", result.fix),
        *(("note", note.replace("`reference`", "--reference")) for note in result.notes),
    ]
    table = Table(show_header=False, box=None)
    table.add_row("verdict", verdict)
    for name, value in rows:
        if value not in (None, ""):
            table.add_row(name, escape(str(value)))
    out.print(table, highlight=False)
