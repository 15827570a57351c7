"""What a larger draft vocabulary gives the shipped heads, without training.

    python -m benchmarks.drafter.vocabulary DATA [--limit 16] [--tokens 128] [--method p-eagle]

A token outside the draft vocabulary is never drafted. The rows of lm_head are the target's own, so
a drafter can be given more of them: here all. The table shows how many tokens of the target's
answers are in the draft vocabulary, and the acceptance length with it and with the whole vocabulary
(K = 7, greedy, float32 on a CPU). `+-` is the standard error of the difference, from a bootstrap.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.drafter.bits import RememberedFeatures, count, mean_length, standard_error
from peagle.core import parse_method
from peagle.data.bench import read_sets
from peagle.drafter import Drafter
from peagle.loaded import load
from peagle.target import Target
from peagle.train.data.documents import Documents
from peagle.train.evaluation.benchmark_answers import answer_tasks

SETS = ("humaneval", "mt_bench", "gsm8k")


def with_whole_vocabulary(drafter: Drafter, target: Target) -> Drafter:
    """The same weights over all tokens of the target."""
    config = replace(drafter.config, draft_vocab_size=target.vocab_size)
    whole = Drafter(config, drafter.context)
    whole.load_state_dict(drafter.state_dict())
    whole.set_embed_and_head(target.embedding, target.lm_head)
    return whole.to(drafter.dtype).eval().requires_grad_(False)


def coverage(drafter: Drafter, documents: Documents) -> float:
    """The fraction of the answers' tokens in the draft vocabulary."""
    tokens = documents.ids[documents.answer_mask]
    ids = np.arange(drafter.config.vocab_size)
    if drafter.target_ids is not None:
        ids = drafter.target_ids.numpy()
    return float(np.isin(tokens, ids).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--limit", type=int, default=16, help="tasks of each set")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--method", default="p-eagle,eagle3")
    options = parser.parse_args()
    pair = load(device="cpu", dtype="float32")
    answers = {
        name: answer_tasks(
            pair.target, tasks[:: len(tasks) // options.limit][: options.limit], options.tokens
        )[0]
        for name, tasks in read_sets(list(SETS), options.data).items()
    }
    print("| head | vocabulary | covers | " + " | ".join(SETS) + " | mean | change |")
    print("|---|--:|---|" + "--:|" * (len(SETS) + 2), flush=True)
    for method in options.method.split(","):
        own = pair.drafter(parse_method(method))
        features = RememberedFeatures(pair.target, own.config.aux_layer_ids or ())
        base = count(own, features, answers)
        for drafter in (own, with_whole_vocabulary(own, pair.target)):
            counts = base if drafter is own else count(drafter, features, answers)
            shares = " / ".join(
                f"{coverage(drafter, documents):.1%}" for documents in answers.values()
            )
            lengths = [mean_length({name: counts[name]}) for name in counts]
            cells = " | ".join(f"{x:.3f}" for x in (*lengths, mean_length(counts)))
            change = mean_length(counts) / mean_length(base) - 1
            print(
                f"| {method} | {drafter.config.draft_vocab_size:,} | {shares} | {cells} |"
                f" {change:+.1%} +- {standard_error(counts, base):.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
