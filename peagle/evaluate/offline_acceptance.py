"""The acceptance length of whole sets in minutes: the target answers in batches, then a walk along the matches.

It gives what decoding gives (train/acceptance.py tells why, tests/test_acceptance.py that it does), but for two things:
drafts behind the end of an answer do not count as accepted, and below float32 a near tie may fall otherwise.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from peagle.data.bench import Task
from peagle.data.records import ignore
from peagle.draft_shape import DraftShape
from peagle.drafter import Drafter
from peagle.errors import UserError
from peagle.evaluate.evaluate import Advance, EvaluateSettings, Evaluation, SetResult, summarize
from peagle.target import Target
from peagle.train.data.attention_mask import MOST_DEPTHS
from peagle.train.data.documents import Documents
from peagle.train.evaluation.acceptance import acceptance, tree_acceptance
from peagle.train.evaluation.benchmark_answers import answer_tasks
from peagle.train.features.features import Features, packable
from peagle.train.objective.passes import Passes

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair

TOKENS = {"cuda": 16384}  # of a pack
TOKENS_ELSEWHERE = 2048


def offline_acceptance(
    loaded: "LoadedPair",
    sets: Mapping[str, list[Task]],
    settings: EvaluateSettings,
    advance: Advance = ignore,
) -> Evaluation:
    """As evaluate.evaluate, without decoding."""
    drafter, target = loaded.drafter(settings.method), loaded.target
    if max(settings.ks) > MOST_DEPTHS:
        raise UserError(
            f"--jump drafts at most {MOST_DEPTHS} tokens: use a smaller -k, or leave it out"
        )
    answers: dict[tuple[str, float], tuple[Documents, int]] = {}
    for name, tasks in sets.items():
        for temperature in settings.temperatures:
            answers[name, temperature] = answer_tasks(
                target, tasks, settings.max_tokens, temperature, settings.seed
            )
            advance(f"{name} T={temperature:g} answered")
    results: list[SetResult] = []
    walk = Walk(drafter, target)
    for (name, temperature), (documents, skipped) in answers.items():
        told = {
            "set": name,
            "temperature": temperature,
            "tasks": len(sets[name]),
            "skipped": skipped,
        }
        results += walk(documents, settings.ks, told, settings.tree)
        advance(f"{name} T={temperature:g} drafted")
    walk.features.release()
    dtype = str(target.dtype).removeprefix("torch.")
    return Evaluation(
        loaded.pair.name, target.name or "", dtype, drafter.config.trained, settings, tuple(results)
    )


class Walk:
    """Drafts along known answers, on a GPU with flex attention and compiled."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.cuda = target.device.type == "cuda"
        self.tokens = TOKENS.get(target.device.type, TOKENS_ELSEWHERE)
        self.features = Features(
            target, drafter.config.aux_layer_ids or (), self.cuda and packable(target)
        )
        self.passes = Passes(drafter)
        if self.cuda:
            self.passes.compile()

    def __call__(
        self, documents: Documents, ks: Sequence[int], told: dict[str, Any], nodes: int = 0
    ) -> list[SetResult]:
        """A result for each K, of chains or of trees; an answer's first token, the prefill's, is counted with the
        others."""
        start = time.perf_counter()
        how = self.tokens, self.cuda
        if nodes:
            found = tree_acceptance(
                self.passes, self.features, documents, [DraftShape(k, nodes) for k in ks], *how
            )
            steps = {tree.k: walked for tree, walked in found.items()}
        else:
            steps = acceptance(self.passes, self.features, documents, ks, *how)
        spent = time.perf_counter() - start
        results = {k: summarize(steps[k], k) for k in ks}
        return [
            replace(one, tokens=one.tokens + len(documents), seconds=spent, **told)
            for one in results.values()
        ]
