"""The acceptance length of whole sets in minutes: the target answers in batches, then a replay.

The result equals that of decoding (train/evaluation/replay.py explains why), with two
exceptions: drafts behind the end of an answer do not count as accepted, and below float32 a near
tie may fall differently.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from peagle.core import Step
from peagle.data.bench import Task
from peagle.data.records import ignore
from peagle.draft_shape import DraftShape
from peagle.drafter import Drafter
from peagle.errors import UserError
from peagle.evaluate.evaluate import (
    Advance,
    EvaluateSettings,
    Evaluation,
    SetResult,
    require_fitting_prompts,
    summarize,
)
from peagle.target import Target
from peagle.train.data.chains import MAX_DEPTHS
from peagle.train.data.documents import Documents
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.benchmark_answers import answer_tasks
from peagle.train.features.features import FeatureExtractor
from peagle.train.features.packed_attention import supports_packed_attention
from peagle.train.objective.passes import DrafterPasses

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair

CUDA_PACK_TOKENS = 16384
CPU_PACK_TOKENS = 2048


def offline_acceptance(
    loaded: "LoadedPair",
    sets: Mapping[str, list[Task]],
    settings: EvaluateSettings,
    advance: Advance = ignore,
) -> Evaluation:
    """The same as evaluate.evaluate, without decoding."""
    drafter = loaded.drafter(settings.method)
    target = loaded.target
    if max(settings.ks) > MAX_DEPTHS:
        raise UserError(
            f"`jump` drafts at most {MAX_DEPTHS} tokens: use a smaller `k`, or leave it out"
        )
    require_fitting_prompts(loaded, sets)
    answers: dict[tuple[str, float], tuple[Documents, int]] = {}
    for name, tasks in sets.items():
        for temperature in settings.temperatures:
            answers[name, temperature] = answer_tasks(
                target, tasks, settings.max_tokens, temperature, settings.seed
            )
            advance(f"{name} T={temperature:g} answered")
    results: list[SetResult] = []
    features = new_extractor(drafter, target)
    replay = new_replay(drafter, features)
    for (name, temperature), (documents, skipped) in answers.items():
        for result in replay_set(replay, documents, settings.ks, settings.tree):
            results.append(
                replace(
                    result,
                    set=name,
                    temperature=temperature,
                    tasks=len(sets[name]),
                    skipped=skipped,
                )
            )
        advance(f"{name} T={temperature:g} drafted")
    features.release()
    return Evaluation(
        pair=loaded.pair.name,
        target=target.name or "",
        dtype=str(target.dtype).removeprefix("torch."),
        trained=drafter.config.trained,
        settings=settings,
        results=tuple(results),
    )


def new_extractor(drafter: Drafter, target: Target) -> FeatureExtractor:
    packed = target.device.type == "cuda" and supports_packed_attention(target)
    return FeatureExtractor(target, drafter.config.aux_layer_ids or (), packed)


def new_replay(drafter: Drafter, features: FeatureExtractor) -> DraftReplay:
    """Drafting along known answers; on a GPU with flex attention, compiled."""
    cuda = features.target.device.type == "cuda"
    passes = DrafterPasses(drafter)
    if cuda:
        passes.compile()
    pack_tokens = CUDA_PACK_TOKENS if cuda else CPU_PACK_TOKENS
    return DraftReplay(passes, features, pack_tokens, cuda)


def replay_set(
    replay: DraftReplay, documents: Documents, ks: Sequence[int], nodes: int = 0
) -> list[SetResult]:
    """A result for each K, of chains or of trees of `nodes` nodes.

    The first token of an answer, from the prefill, counts among its tokens.
    """
    started = time.perf_counter()
    steps: dict[int, list[Step]]
    if nodes:
        trees = replay.tree_steps(documents, [DraftShape(k, nodes) for k in ks])
        steps = {shape.k: tree_steps for shape, tree_steps in trees.items()}
    else:
        steps = replay.chain_steps(documents, ks)
    seconds = time.perf_counter() - started
    results = [summarize(own_steps, k) for k, own_steps in steps.items()]
    return [
        replace(result, tokens=result.tokens + len(documents), seconds=seconds)
        for result in results
    ]
