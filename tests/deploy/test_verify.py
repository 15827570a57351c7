"""`peagle verify`: real servers of the tiny pair, and servers that answer like vLLM."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from peagle.cli import app
from peagle.deploy.verify import Verification, proof, verify
from peagle.deploy.verify.http_endpoint import HttpEndpoint
from peagle.loaded import LoadedPair
from tests.support.server.fake_vllm import fake_vllm
from tests.support.server.serving import make_backend, running, tiny_pair

ACCEPTED = ("w32 w9 w30", "w60 w9 w30")  # The tiny target accepts drafts for these prompts.
REJECTED = ("w0 w9 w30", "w8 w9 w30")


@pytest.fixture(autouse=True)
def prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "PROMPTS", ACCEPTED)


@pytest.fixture(scope="module")
def tiny_url() -> Iterator[str]:
    with running(make_backend()) as (_, url):
        yield url


@pytest.fixture(scope="module")
def plain_url() -> Iterator[str]:
    """A server of the same target without a drafter."""
    pair = tiny_pair()
    plain = LoadedPair(replace(pair.pair, drafters={}), pair.target, {})
    with running(make_backend(lambda: plain, method=None, k=None)) as (_, url):
        yield url


def run(*words: object, code: int = 0) -> Any:
    """The JSON of a verification, or the message of an error."""
    result = CliRunner().invoke(app, ["verify", *map(str, words), "--json"])
    assert result.exit_code == code, result.output + repr(result.exception)
    return " ".join(result.stderr.split()) if code == 2 else json.loads(result.stdout)


def test_a_server_that_speculates(tiny_url: str) -> None:
    result = run(tiny_url)
    assert (result["proven"], result["verdict"]) == (True, "speculating")
    assert (result["kind"], result["model"], result["evidence"]) == ("peagle", "tiny", "answers")
    assert result["acceptance_length"] == pytest.approx(
        1 + result["accepted_tokens"] / result["drafts"], abs=1e-4
    )
    assert result["draft_tokens"] >= result["accepted_tokens"] > 0
    assert result["tokens"] == 256
    without = "the same server, method none"
    assert result["comparison"] == {"without": without, "compared": 2, "equal": 2}
    assert result["cause"] is None


def test_untrained_drafter(tiny_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "PROMPTS", REJECTED)
    result = run(tiny_url, code=1)
    assert (result["verdict"], result["acceptance_length"]) == ("not speculating", 1.0)
    assert result["drafts"] > 0
    assert "accepts none of the drafts" in result["cause"]


def test_a_server_with_method_none() -> None:
    with running(make_backend(method="none", k=None)) as (_, url):
        result = run(url, code=1)
    assert (result["verdict"], result["drafts"]) == ("not speculating", 0)
    assert result["cause"] == "the server runs the method none"
    assert "--method p-eagle" in result["fix"]


def test_a_server_without_a_drafter(plain_url: str) -> None:
    assert run(plain_url, code=1)["cause"] == "the server runs the method none"


def test_reference_without_a_drafter(tiny_url: str, plain_url: str) -> None:
    result = run(tiny_url, "--reference", plain_url)
    assert result["comparison"] == {"without": plain_url, "compared": 2, "equal": 2}


def test_method_none_that_is_not_offered() -> None:
    with running(make_backend(methods=("p-eagle",))) as (_, url):
        result = run(url)
    assert result["comparison"] is None
    assert "give `reference`" in result["notes"][0]


def test_table(tiny_url: str) -> None:
    result = CliRunner().invoke(app, ["verify", tiny_url], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "speculating" in result.stdout
    assert "2 of 2" in result.stdout


def verify_fake(reference: str | None = None, **changes: Any) -> Verification:
    other = HttpEndpoint(reference) if reference else None
    with fake_vllm(**changes) as server:
        return verify(HttpEndpoint(server.url), 16, other)


def test_vllm_with_a_drafter_is_proven_by_counters() -> None:
    result = verify_fake()
    assert (result.proven, result.kind, result.evidence) == (True, "vllm", "metrics")
    assert (result.drafts, result.draft_tokens, result.accepted_tokens) == (8, 24, 16)
    assert result.acceptance_length == 3.0
    assert "the counts may include other requests at the same time" in result.notes


def test_vllm_is_proven_by_metrics_in_answers() -> None:
    result = verify_fake(request_metrics=True, metrics=False)
    assert (result.proven, result.evidence, result.acceptance_length) == (True, "answers", 3.0)
    assert result.tokens == 24


def test_vllm_without_a_drafter() -> None:
    result = verify_fake(drafter=False)
    assert (result.verdict, result.evidence, result.drafts) == ("not speculating", "metrics", None)
    assert "without a speculative config" in str(result.cause)
    assert "--speculative-config" in str(result.fix)


def test_vllm_that_rejects_all_drafts() -> None:
    result = verify_fake(accepted=0)
    assert (result.verdict, result.acceptance_length) == ("not speculating", 1.0)
    assert "accepts none of the drafts" in str(result.cause)


def test_causes_of_a_peagle_server_without_drafts(tiny_url: str) -> None:
    assert "made none for these requests" in HttpEndpoint(tiny_url).explain(True).cause
    with running(make_backend(k="auto")) as (_, url):
        assert "adaptive drafting expects no gain" in HttpEndpoint(url).explain(True).cause


def test_counters_of_another_replica_are_no_evidence() -> None:
    result = verify_fake(counters_step=-1)
    assert (result.verdict, result.drafts) == ("unproven", None)


def test_answer_with_a_line_separator() -> None:
    assert verify_fake(word="a\u2028b").proven


def test_no_evidence() -> None:
    result = verify_fake(metrics=False, owner="someone")
    assert (result.proven, result.verdict, result.evidence) == (False, "unproven", None)
    assert "--per-request-spec-decode-metrics" in str(result.fix)
    assert "a chunk of a stream holds 3.00 tokens on average: no proof" in result.notes


def test_answers_of_the_reference() -> None:
    with fake_vllm(drafter=False) as equal, fake_vllm(drafter=False, word="no") as other:
        same = verify_fake(reference=equal.url)
        different = verify_fake(reference=other.url)
    assert same.proven
    assert (different.verdict, different.proven) == ("speculating", False)
    assert different.comparison is not None
    assert (different.comparison.compared, different.comparison.equal) == (2, 0)
    assert "differ from those without" in str(different.cause)
    assert "--exact" in str(different.fix)


def test_a_reference_that_drafts_is_noted() -> None:
    with fake_vllm() as other, fake_vllm(drafter=False) as plain:
        assert f"{other.url} drafts too" in " ".join(verify_fake(reference=other.url).notes)
        assert "drafts too" not in " ".join(verify_fake(reference=plain.url).notes)


def test_different_answers_are_exit_code_1() -> None:
    with fake_vllm() as server, fake_vllm(drafter=False, word="no") as other:
        assert run(server.url, "--reference", other.url, code=1)["verdict"] == "speculating"
        assert run(server.url)["proven"]


def test_api_keys() -> None:
    with fake_vllm(key="k") as server:
        assert "answers 401: give its key with --api-key" in run(server.url, code=2)
        assert run(server.url, "--api-key", "k")["proven"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["localhost:8000"], "error: 'localhost:8000' is not a URL: write it like http://local"),
        (["http://[::1"], "is not a URL"),
        (["http://127.0.0.1:9", "--api-key", "ключ"], "--api-key has characters that an HTTP"),
        (["http://127.0.0.1:9"], "start the server, or correct the URL"),
        (["sagemaker://"], "sagemaker:// has no name"),
        (["http://127.0.0.1:9", "--max-tokens", 2], "--max-tokens 2 is too few"),
    ],
)
def test_wrong_input_is_exit_code_2(words: list[object], message: str) -> None:
    assert message in run(*words, code=2)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("500", "answers 500"),
        ("broken stream", "the stream ended before its [DONE]"),
        ("not JSON", "answers with text/html instead of a stream of events: correct the URL"),
        ("redirect", "redirects to https://elsewhere/v1/chat/completions: use the URL of that"),
    ],
)
def test_a_failing_server_is_exit_code_2(failure: str, message: str) -> None:
    with fake_vllm(failure=failure) as server:
        assert message in run(server.url, code=2)
