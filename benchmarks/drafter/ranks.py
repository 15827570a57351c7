"""Which candidate of a drafter is the target's token: the constants of forced acceptance.

    python -m benchmarks.drafter.ranks DATA [--set humaneval,mt_bench,gsm8k] [--limit 20]

The target answers the tasks of each set (DATA has the sets as files), greedily and with at most 256
tokens, and the drafter drafts at every token of the answers. From the steps that decoding with
trees of 31 nodes would take come the shares of ranks where the path so far is accepted and the best
candidate is not the target's token (RANK_SHARES of peagle/engine/sampling/forced_acceptance.py).
The table has acceptance lengths on these answers, of chains and trees, beside those of the model
with the chain's profile. The model's other constant, the concentration of confidences, is the one
of a list with the least mean error.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peagle.bench.step_cost import conditional_probabilities
from peagle.data.bench import read_sets
from peagle.draft_shape import CANDIDATES_PER_DEPTH, DraftShape
from peagle.drafter.branching import Branching
from peagle.engine.sampling.forced_acceptance import expected_length
from peagle.evaluate.offline_acceptance import new_extractor, new_replay
from peagle.loaded import load
from peagle.train.data.pack import PackedDocuments
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.benchmark_answers import answer_tasks
from peagle.train.evaluation.replay import (
    answer_spans,
    candidate_matches,
    chain_matches,
    expected_tokens,
)

K = 7
TREES = (15, 31)
NO_CANDIDATE = CANDIDATES_PER_DEPTH  # rank of a token that is no candidate
UNKNOWN = -1  # behind the end of the answer, or behind a token that is no candidate
CONCENTRATIONS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 1000.0)
ANCHORS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class SetRanks:
    """What the steps of one set accept."""

    profile: list[float]  # of chains
    lengths: dict[int, float]  # by nodes of trees
    ranks: np.ndarray  # of the target's token wherever a tree of 31 nodes accepted the path so far


def token_ranks(tokens: Tensor, logp: Tensor, expected: Tensor) -> Tensor:
    """The rank of each expected token, from 0, behind those before it: [A, K].

    tokens [A, K, M], logp [A, K, 1 or M, M]: the candidates; expected [A, K].
    """
    each = torch.arange(len(tokens), device=tokens.device)
    ranks = torch.full_like(expected, UNKNOWN)
    previous = torch.zeros_like(each)  # the index of the expected token among the candidates
    known = torch.ones_like(each, dtype=torch.bool)
    for depth in range(K):
        own_logp = logp[each, depth, previous if logp.shape[2] > 1 else 0]
        matches = tokens[:, depth] == expected[:, depth, None]
        previous = matches.int().argmax(1)
        rank = (own_logp > own_logp.gather(1, previous[:, None])).sum(1)
        rank = torch.where(matches.any(1), rank, NO_CANDIDATE)
        known &= expected[:, depth] >= 0
        ranks[:, depth] = torch.where(known, rank, UNKNOWN)
        known &= rank < NO_CANDIDATE
    return ranks


def step_starts(packed: PackedDocuments, anchors: np.ndarray, accepted: np.ndarray) -> list[int]:
    """The indices of the anchors at which decoding starts a step."""
    index = {anchor: i for i, anchor in enumerate(anchors.tolist())}
    starts = []
    for start, end in answer_spans(packed):
        newest = start
        while newest < end - 1:
            starts.append(index[newest - 1])
            newest += int(accepted[index[newest - 1]]) + 1
    return starts


@torch.no_grad()
def measure_pack(
    replay: DraftReplay, packed: PackedDocuments
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Accepted drafts of every step by nodes (K: a chain), and ranks [steps, K] of the last tree.

    Trees are in the order of TREES.
    """
    drafter = replay.passes.drafter
    branching = Branching(drafter)
    anchors = [np.zeros(0, int)]
    accepted: dict[int, list[np.ndarray]] = {nodes: [] for nodes in (K, *TREES)}
    ranks = []
    for group in replay.anchor_drafts(packed, K):
        anchors.append(group.anchors)
        accepted[K].append(chain_matches(packed, group.anchors, group.drafts.cpu().numpy(), K))
        expected = torch.from_numpy(expected_tokens(packed, group.anchors, K))
        expected = expected.to(group.normed.device)
        parts = (group.normed.split(ANCHORS_AT_ONCE), expected.split(ANCHORS_AT_ONCE))
        for normed, known in zip(*parts, strict=True):
            rows = normed.flatten(0, 1).to(drafter.head_dtype)
            ids, logp = branching(rows, drafter.logits(rows), K)
            candidates = (drafter.target_token_ids(ids), logp, known)
            ranks.append(token_ranks(*candidates).cpu().numpy())
            for nodes in TREES:
                matches = candidate_matches(*candidates, DraftShape(K, nodes))
                accepted[nodes].append(matches.cpu().numpy())
    joined = {nodes: np.concatenate(counts) for nodes, counts in accepted.items()}
    starts = {
        nodes: step_starts(packed, np.concatenate(anchors), own) for nodes, own in joined.items()
    }
    steps = {nodes: own[starts[nodes]] for nodes, own in joined.items()}
    return steps, np.concatenate(ranks)[starts[TREES[-1]]]


def measure_set(replay: DraftReplay, packs: Sequence[PackedDocuments]) -> SetRanks:
    results = [measure_pack(replay, packed) for packed in packs]
    steps = {nodes: np.concatenate([own[nodes] for own, _ in results]) for nodes in (K, *TREES)}
    ranks = np.concatenate([own for _, own in results])
    # A tree decides the depths that it accepts and the one behind them.
    decided = (np.arange(K) <= steps[TREES[-1]][:, None]) & (ranks != UNKNOWN)
    profile = [float((steps[K] > depth).mean()) for depth in range(K)]
    lengths = {nodes: 1 + float(steps[nodes].mean()) for nodes in TREES}
    return SetRanks(profile, lengths, ranks[decided])


def rank_shares(sets: Sequence[SetRanks]) -> tuple[list[float], int]:
    """Of ranks 2, 3, .. among all tokens that are not the best candidate, and their number."""
    ranks = np.concatenate([own.ranks for own in sets])
    counts = np.bincount(ranks, minlength=NO_CANDIDATE + 1)
    total = counts[1:].sum()
    return [float(count / total) for count in counts[1:NO_CANDIDATE]], int(total)


def model_lengths(own: SetRanks, shares: list[float], concentration: float) -> dict[int, float]:
    probabilities = conditional_probabilities(own.profile)
    return {
        nodes: expected_length(probabilities, DraftShape(K, nodes), shares, concentration)
        for nodes in TREES
    }


def mean_error(sets: Sequence[SetRanks], shares: list[float], concentration: float) -> float:
    errors = []
    for own in sets:
        model = model_lengths(own, shares, concentration)
        errors += [abs(model[nodes] / own.lengths[nodes] - 1) for nodes in TREES]
    return float(np.mean(errors))


def show_set(name: str, own: SetRanks) -> None:
    profile = " ".join(f"{x:.3f}" for x in own.profile)
    print(f"{name}: chain {1 + sum(own.profile):.3f} ({profile}), {own.lengths}", flush=True)


def show(sets: dict[str, SetRanks]) -> None:
    measured = list(sets.values())
    shares, total = rank_shares(measured)
    print(f"shares of ranks 2, 3, ..: {' '.join(f'{x:.3f}' for x in shares)} ({total:,} tokens)")
    errors = {x: mean_error(measured, shares, x) for x in CONCENTRATIONS}
    print("mean error: " + ", ".join(f"{x:g} {error:.1%}" for x, error in errors.items()))
    best = min(errors, key=lambda x: errors[x])
    print(f"\nconcentration {best:g}:\n| set | chain | " + " | ".join(map(str, TREES)) + " |")
    print("|---|--:|" + "--:|" * len(TREES))
    for name, own in sets.items():
        model = model_lengths(own, shares, best)
        cells = [f"{own.lengths[nodes]:.2f}, model {model[nodes]:.2f}" for nodes in TREES]
        print(f"| {name} | {1 + sum(own.profile):.2f} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the sets")
    parser.add_argument("--set", default="humaneval,mt_bench,gsm8k")
    parser.add_argument("--limit", type=int, default=20, help="tasks of each set")
    parser.add_argument("--pair", default="smollm2-135m")
    options = parser.parse_args()
    pair = load(options.pair, stored=False, dtype="float32")
    drafter = pair.drafter("p-eagle")
    replay = new_replay(drafter, new_extractor(drafter, pair.target))
    sets = {}
    for name, tasks in read_sets(options.set.split(","), options.data, options.limit).items():
        documents, _ = answer_tasks(pair.target, tasks, 256, 0.0, 0)
        sets[name] = measure_set(replay, list(replay.packs(documents)))
        show_set(name, sets[name])
    show(sets)


if __name__ == "__main__":
    main()
