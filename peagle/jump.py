"""The acceptance length of whole sets in minutes: the target answers in batches, then a walk along the matches.

It gives what decoding gives (train/acceptance.py tells why, tests/test_acceptance.py that it does), but for two things:
drafts behind the end of an answer do not count as accepted, and below float32 a near tie may fall otherwise.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from peagle.data.bench import Task
from peagle.data.records import ignore
from peagle.evaluate import Advance, Evaluation, SetResult, Settings, summarise
from peagle.train.acceptance import acceptance
from peagle.train.answered import answer_tasks
from peagle.train.documents import Documents
from peagle.train.features import Features, packable
from peagle.train.passes import Passes

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair

TOKENS = {"cuda": 16384}  # of a pack
TOKENS_ELSEWHERE = 2048


def jump(
    loaded: "LoadedPair", sets: Mapping[str, list[Task]], settings: Settings, advance: Advance = ignore
) -> Evaluation:
    """As evaluate.evaluate, without decoding."""
    drafter, target = loaded.drafter(settings.method), loaded.target
    answers: dict[tuple[str, float], Documents] = {}
    for name, tasks in sets.items():
        for temperature in settings.temperatures:
            answers[name, temperature] = answer_tasks(target, tasks, settings.max_tokens, temperature, settings.seed)
            advance(f"{name} T={temperature:g} answered")
    cuda = target.device.type == "cuda"
    features = Features(target, drafter.config.aux_layer_ids or (), packed=cuda and packable(target))
    passes = Passes(drafter)
    if cuda:
        passes.compile()
    results: list[SetResult] = []
    for (name, temperature), documents in answers.items():
        start = time.perf_counter()
        steps = acceptance(
            passes, features, documents, settings.ks, TOKENS.get(target.device.type, TOKENS_ELSEWHERE), cuda
        )
        results += [
            replace(
                summarise(steps[k], k),
                set=name,
                temperature=temperature,
                tasks=len(sets[name]),
                seconds=time.perf_counter() - start,
            )
            for k in settings.ks
        ]
        advance(f"{name} T={temperature:g} drafted")
    dtype = str(target.dtype).removeprefix("torch.")
    return Evaluation(loaded.pair.name, target.name or "", dtype, drafter.config.trained, settings, tuple(results))
