"""Draws fuzz cases, which depend only on the seed and the number of the case."""

from collections.abc import Sequence
from random import Random
from typing import Any

from peagle.draft_shape import MAX_ADAPTIVE_K
from tests.support.fuzzing.case import FuzzCase, FuzzRequest
from tests.support.fuzzing.targets import CONTEXTS, supports_grammars
from tests.support.grammars import FUZZ_GRAMMARS

TARGETS = (
    *("llama", "llama", "llama words", "llama words"),
    *("qwen3-moe", "gpt-oss", "gpt2", "exact"),
)
VOCAB = range(6, 96)
EOS = 1
LETTER_STOPS = ("a", "b", "1", "ab", "ok", '"', "ea", "X")
TREE_NODES = (6, 9, 15, 31)
SHORT_CONTEXT = 61  # Prompts have at most 54 tokens.


def draw_case(
    seed: int, number: int, targets: Sequence[str] = TARGETS, requests: int = 12
) -> FuzzCase:
    rng = Random(f"{seed}/{number}")
    target = rng.choice(targets)
    engine = with_ngrams(draw_engine(rng, target), Random(f"{seed}/{number}/ngram"))
    common = [rng.choice(VOCAB) for _ in range(40)]
    grammars = supports_grammars(target) and rng.random() < 0.7
    drawn: list[FuzzRequest] = []
    arrival = 0
    for index in range(requests):
        prompt = draw_prompt(rng, common, drawn)
        options = draw_options(rng, index, supports_grammars(target), grammars)
        abort_after = rng.randrange(12) if rng.random() < 0.15 else None
        abort_at_piece = rng.randrange(9) if rng.random() < 0.05 else None
        drawn.append(FuzzRequest(prompt, options, arrival, abort_after, abort_at_piece))
        arrival += rng.choice((0, 0, 1, 3))
    planted = 0.4 if target.startswith("llama") else 0.9  # Other targets have untrained drafters.
    return FuzzCase(
        target,
        engine,
        tuple(drawn),
        lookahead=rng.choice((0, 1, 1)),
        shape_seed=rng.randrange(1000) if rng.random() < 0.7 else None,
        draft_seed=rng.randrange(1000) if rng.random() < planted else None,
    )


def draw_engine(rng: Random, target: str) -> dict[str, Any]:
    method = rng.choice(("p-eagle", "p-eagle", "p-eagle", "p-eagle", "eagle3", "none"))
    k: int | str = rng.choice((1, 2, 3, 5, 7, "auto", "auto"))
    options: dict[str, Any] = {
        "method": method,
        "k": k,
        "page_size": rng.choice((2, 3, 4, 5, 6, 7, 8, 9, 16)),
        "max_batch": rng.choice((1, 2, 3, 4, 5, 6, 6)),
        "prefill_chunk": rng.randint(3, 50),
        "prefix_caching": rng.random() < 0.8,
    }
    if CONTEXTS[target] > SHORT_CONTEXT and rng.random() < 0.25:
        options["context"] = SHORT_CONTEXT
    if target == "exact":
        return options | {"exact": True, "page_size": 16, "kv_tokens": 400}
    if method == "p-eagle" and rng.random() < 0.6:
        depth = MAX_ADAPTIVE_K if k == "auto" else int(k)
        sizes = [nodes for nodes in TREE_NODES if 1 < depth < nodes]
        options |= {"tree": rng.choice(sizes)} if sizes else {}
    # The longest prompt and its drafts fit, but only a few requests do.
    options["kv_tokens"] = options.get("tree", 7) + rng.randint(66, 140)
    return options


def with_ngrams(engine: dict[str, Any], rng: Random) -> dict[str, Any]:
    """Add n-gram drafts to half of the engines without a drafter, and to some with one."""
    if engine["method"] == "none":
        return engine | {"method": rng.choice(("none", "ngram"))}
    return engine | {"ngram": rng.choice((None, True, False))}


def draw_prompt(rng: Random, common: list[int], earlier: Sequence[FuzzRequest]) -> tuple[int, ...]:
    """A random prompt; many share a prefix, and some repeat an earlier prompt."""
    if earlier and rng.random() < 0.2:
        return rng.choice(earlier).prompt
    own = [rng.choice(VOCAB) for _ in range(rng.randint(1, 14))]
    shared = common[: rng.choice((0, 0, 9, 16, 30, 40))]
    if rng.random() < 0.2:  # The shared tokens are at other positions.
        return (*own, *shared)
    return (*shared, *own)


def draw_options(rng: Random, index: int, letters: bool, grammars: bool) -> dict[str, Any]:
    max_tokens = rng.choice((rng.randint(1, 30), rng.randint(1, 30), 60))
    options: dict[str, Any] = {"max_tokens": max_tokens, "user": rng.choice("ab")}
    options |= draw_sampling(rng, index)
    if rng.random() < 0.3:
        options["min_tokens"] = rng.randint(0, min(max_tokens, 12))
    if rng.random() < 0.2:
        options["stop_ids"] = frozenset(rng.sample(VOCAB, 8))
    if rng.random() < 0.3:
        words = LETTER_STOPS if letters else [f"w{n}" for n in range(10)]
        options["stop"] = tuple(rng.sample(words, 2))
    if rng.random() < 0.3:
        options["include_stop"] = True
    if rng.random() < 0.3:
        options["logprobs"] = rng.choice((0, 1, 5))
    if rng.random() < 0.2:
        options["cache_salt"] = rng.choice("xy")
    if grammars and rng.random() < 0.4:
        options["grammar"] = rng.choice(FUZZ_GRAMMARS)
    elif rng.random() < 0.2:
        options["ignore_eos"] = True
    return options


def draw_sampling(rng: Random, index: int) -> dict[str, Any]:
    """Random fields of `core.Sampling`; most requests sample."""
    options: dict[str, Any] = {}
    if rng.random() < 0.6:
        options = {"temperature": rng.choice((0.3, 0.8, 1.5)), "seed": index}
    choices: dict[str, tuple[float, ...]] = {
        "top_p": (0.5, 0.9),
        "top_k": (1, 3, 20, 200),
        "min_p": (0.05, 0.3),
        "repetition_penalty": (0.7, 1.3, 2.0),
        "frequency_penalty": (-1.0, 0.5, 1.5),
        "presence_penalty": (-1.0, 0.5, 1.5),
    }
    for name, values in choices.items():
        if rng.random() < 0.25:
            options[name] = rng.choice(values)
    if rng.random() < 0.3:
        token = rng.randrange(96)
        options["logit_bias"] = {token: rng.choice((-100.0, 3.0, 6.0))}
        options["logit_bias"][EOS] = rng.choice((0.0, 0.0, 2.0, 5.0))
    return options
