"""Draws fuzz cases: everything a case holds follows from the seed and the number of the case."""

from collections.abc import Sequence
from random import Random
from typing import Any

from peagle.draft_shape import MAX_ADAPTIVE_K
from tests.support.fuzzing.case import FuzzCase, FuzzRequest
from tests.support.fuzzing.targets import CONTEXTS, spells
from tests.support.grammars import FUZZ_GRAMMARS

TARGETS = (
    *("llama", "llama", "llama words", "llama words"),
    *("qwen3-moe", "gpt-oss", "gpt2", "exact"),
)
VOCAB = range(6, 96)
EOS = 1
LETTER_STOPS = ("a", "b", "1", "ab", "ok", '"', "ea", "X")
TREE_NODES = (6, 9, 15, 31)
SHORT_CONTEXT = 61  # a prompt of up to 54 tokens fits


def draw_case(
    seed: int, number: int, targets: Sequence[str] = TARGETS, requests: int = 12
) -> FuzzCase:
    chance = Random(f"{seed}/{number}")
    target = chance.choice(targets)
    engine = with_ngrams(draw_engine(chance, target), Random(f"{seed}/{number}/ngram"))
    common = [chance.choice(VOCAB) for _ in range(40)]
    grammars = spells(target) and chance.random() < 0.7
    drawn: list[FuzzRequest] = []
    arrival = 0
    for index in range(requests):
        prompt = draw_prompt(chance, common, drawn)
        options = draw_options(chance, index, spells(target), grammars)
        abort_after = chance.randrange(12) if chance.random() < 0.15 else None
        abort_at_piece = chance.randrange(9) if chance.random() < 0.05 else None
        drawn.append(FuzzRequest(prompt, options, arrival, abort_after, abort_at_piece))
        arrival += chance.choice((0, 0, 1, 3))
    planted = 0.4 if target.startswith("llama") else 0.9  # of others the drafters are untrained
    return FuzzCase(
        target,
        engine,
        tuple(drawn),
        lookahead=chance.choice((0, 1, 1)),
        shape_seed=chance.randrange(1000) if chance.random() < 0.7 else None,
        draft_seed=chance.randrange(1000) if chance.random() < planted else None,
    )


def draw_engine(chance: Random, target: str) -> dict[str, Any]:
    method = chance.choice(("p-eagle", "p-eagle", "p-eagle", "p-eagle", "eagle3", "none"))
    k: int | str = chance.choice((1, 2, 3, 5, 7, "auto", "auto"))
    options: dict[str, Any] = {
        "method": method,
        "k": k,
        "page_size": chance.choice((2, 3, 4, 5, 6, 7, 8, 9, 16)),
        "max_batch": chance.choice((1, 2, 3, 4, 5, 6, 6)),
        "prefill_chunk": chance.randint(3, 50),
        "prefix_caching": chance.random() < 0.8,
    }
    if CONTEXTS[target] > SHORT_CONTEXT and chance.random() < 0.25:
        options["context"] = SHORT_CONTEXT
    if target == "exact":
        return options | {"exact": True, "page_size": 16, "kv_tokens": 400}
    if method == "p-eagle" and chance.random() < 0.6:
        depth = MAX_ADAPTIVE_K if k == "auto" else int(k)
        sizes = [nodes for nodes in TREE_NODES if 1 < depth < nodes]
        options |= {"tree": chance.choice(sizes)} if sizes else {}
    # The longest prompt fits with the drafts behind it; a few do not.
    options["kv_tokens"] = options.get("tree", 7) + chance.randint(66, 140)
    return options


def with_ngrams(engine: dict[str, Any], chance: Random) -> dict[str, Any]:
    """Half of the engines without a drafter draft n-grams, and some of those with one."""
    if engine["method"] == "none":
        return engine | {"method": chance.choice(("none", "ngram"))}
    return engine | {"ngram": chance.choice((None, True, False))}


def draw_prompt(
    chance: Random, common: list[int], earlier: Sequence[FuzzRequest]
) -> tuple[int, ...]:
    """Many begin alike, and some have been asked before."""
    if earlier and chance.random() < 0.2:
        return chance.choice(earlier).prompt
    own = [chance.choice(VOCAB) for _ in range(chance.randint(1, 14))]
    shared = common[: chance.choice((0, 0, 9, 16, 30, 40))]
    if chance.random() < 0.2:  # the same tokens at other positions
        return (*own, *shared)
    return (*shared, *own)


def draw_options(chance: Random, index: int, letters: bool, grammars: bool) -> dict[str, Any]:
    max_tokens = chance.choice((chance.randint(1, 30), chance.randint(1, 30), 60))
    options: dict[str, Any] = {"max_tokens": max_tokens, "user": chance.choice("ab")}
    options |= draw_sampling(chance, index)
    if chance.random() < 0.3:
        options["min_tokens"] = chance.randint(0, min(max_tokens, 12))
    if chance.random() < 0.2:
        options["stop_ids"] = frozenset(chance.sample(VOCAB, 8))
    if chance.random() < 0.3:
        words = LETTER_STOPS if letters else [f"w{n}" for n in range(10)]
        options["stop"] = tuple(chance.sample(words, 2))
    if chance.random() < 0.3:
        options["include_stop"] = True
    if chance.random() < 0.3:
        options["logprobs"] = chance.choice((0, 1, 5))
    if chance.random() < 0.2:
        options["cache_salt"] = chance.choice("xy")
    if grammars and chance.random() < 0.4:
        options["grammar"] = chance.choice(FUZZ_GRAMMARS)
    elif chance.random() < 0.2:
        options["ignore_eos"] = True
    return options


def draw_sampling(chance: Random, index: int) -> dict[str, Any]:
    """Fields of `core.Sampling`; every other one samples."""
    options: dict[str, Any] = {}
    if chance.random() < 0.6:
        options = {"temperature": chance.choice((0.3, 0.8, 1.5)), "seed": index}
    choices: dict[str, tuple[float, ...]] = {
        "top_p": (0.5, 0.9),
        "top_k": (1, 3, 20, 200),
        "min_p": (0.05, 0.3),
        "repetition_penalty": (0.7, 1.3, 2.0),
        "frequency_penalty": (-1.0, 0.5, 1.5),
        "presence_penalty": (-1.0, 0.5, 1.5),
    }
    for name, values in choices.items():
        if chance.random() < 0.25:
            options[name] = chance.choice(values)
    if chance.random() < 0.3:
        token = chance.randrange(96)
        options["logit_bias"] = {token: chance.choice((-100.0, 3.0, 6.0))}
        options["logit_bias"][EOS] = chance.choice((0.0, 0.0, 2.0, 5.0))
    return options
