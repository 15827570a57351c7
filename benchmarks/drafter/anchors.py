"""Where decoding starts steps, and how likely the nodes of trees are: constants of two objectives.

    python -m benchmarks.drafter.anchors ANSWERS [--limit 40] [--pair smollm2-135m] [--drafter DIR]

ANSWERS is a folder of `peagle regenerate`, greedy. The first table has the anchors of the answers
by whether the depth-0 row before an anchor drafts the anchor's newest token: how many there are,
and at how many of them decoding with K = 7 starts a step (train/objective/on_policy.py). The second
table has quantiles of the log-probability of the least likely node of a tree
(train/objective/length_objective.py).
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peagle.drafter.branching import Branching
from peagle.drafter.formats import checkpoint
from peagle.evaluate.offline_acceptance import new_extractor
from peagle.kernels.triton.build_tree import tree_topology
from peagle.loaded import load
from peagle.train.data.documents import read_documents
from peagle.train.data.pack import PackedDocuments
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.replay import answer_spans, chain_matches
from peagle.train.objective.passes import DrafterPasses

K = 7
NODES = (15, 31, 60)
QUANTILES = (5, 25, 50, 75, 95)


def count_starts(packed: PackedDocuments, anchors: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """[2, 2]: anchors behind a wrong and behind a right depth-0 row, and where steps start."""
    accepted = dict(zip(anchors.tolist(), chain_matches(packed, anchors, drafts, K), strict=True))
    counts = np.zeros((2, 2), dtype=np.int64)
    for start, end in answer_spans(packed):
        newest = start
        starts = set()
        while newest < end - 1:
            starts.add(newest - 1)
            newest += accepted[newest - 1] + 1
        for anchor in range(start, end - 2):
            counts[int(accepted[anchor - 1] > 0)] += (1, anchor in starts)
    return counts


def least_likely(logp: Tensor, nodes: int) -> Tensor:
    """logp [A, K, 1 or M, M] -> the log-probability of the least likely node of each tree, [A]."""
    tree = tree_topology(logp, nodes)
    sums = logp.new_zeros(len(logp), nodes + 1)  # column 0 is the root
    chosen = torch.zeros_like(tree.parents[:, :1], dtype=torch.long).expand(-1, nodes + 1).clone()
    each = torch.arange(len(logp), device=logp.device)
    for node in range(nodes):
        parent = tree.parents[:, node].long()
        candidate = tree.candidates[:, node]
        line = chosen[each, parent] if logp.shape[2] > 1 else 0
        step = logp[each, tree.depths[:, node].long() - 1, line, candidate]
        sums[:, node + 1] = sums[each, parent] + step
        chosen[:, node + 1] = candidate
    return sums[:, 1:].amin(1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--limit", type=int, default=40, help="answers, evenly spread")
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--drafter", type=Path, help="folder; the pair's P-EAGLE head by default")
    options = parser.parse_args()
    pair = load(options.pair, stored=False)
    target = pair.target
    drafter = pair.drafter("p-eagle")
    if options.drafter is not None:
        drafter = checkpoint.load(options.drafter, target)
    documents = read_documents([options.answers], target, 1024)
    stride = max(1, len(documents) // options.limit)
    documents = documents.subset(np.arange(0, len(documents), stride))
    cuda = target.device.type == "cuda"
    passes = DrafterPasses(drafter, target.dtype)
    replay = DraftReplay(passes, new_extractor(drafter, target), 2048, cuda)
    branching = Branching(drafter)
    counts = np.zeros((2, 2), dtype=np.int64)
    lowest: dict[int, list[Tensor]] = {nodes: [] for nodes in NODES}
    for packed in replay.packs(documents):
        anchors, drafts = replay.draft(packed, K)
        counts += count_starts(packed, anchors, drafts)
        for group in replay.anchor_drafts(packed, K):
            rows = group.normed[::8].flatten(0, 1).to(drafter.head_dtype)
            _, logp = branching(rows, drafter.logits(rows), K)
            for nodes in NODES:
                lowest[nodes].append(least_likely(logp, nodes).cpu())
    print("| depth-0 row before the anchor | anchors | steps start there |\n|---|--:|--:|")
    for label, (total, starts) in zip(("wrong", "right"), counts, strict=True):
        print(f"| {label} | {total:,} | {starts / max(total, 1):.0%} |")
    print("| nodes | trees | " + " | ".join(f"{q} %" for q in QUANTILES) + " |")
    print("|--:|--:|" + "--:|" * len(QUANTILES))
    for nodes in NODES:
        values = torch.cat(lowest[nodes]).numpy()
        cells = [f"{value:.2f}" for value in np.percentile(values, QUANTILES)]
        print(f"| {nodes} | {len(values)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
