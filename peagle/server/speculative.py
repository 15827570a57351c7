"""vLLM's speculative config, as `--speculative-config` and SM_VLLM_SPECULATIVE_CONFIG carry it.

    {"method": "eagle3", "model": "/opt/ml/.../eagle", "num_speculative_tokens": 7, "parallel_drafting": true}

`parallel_drafting` makes it P-EAGLE. What our engine cannot honor is refused; what makes no difference to it is not.

    {"model": "DIR", "parallel_drafting_spec": {"num_branches": [8, 8, 4, 4, 2, 2, 1], "depth": 7}}

is a tree of the native engine: as many nodes as there are branches at all depths together, and as deep. Which branches
they go to is decided anew in every step, by what is likeliest to be accepted. One number is that of every depth.
No vLLM has this block: for it, it is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from peagle.core import Method
from peagle.errors import UserError, nearest

METHODS = ("eagle3", "eagle", "p-eagle")
USED = ("method", "model", "num_speculative_tokens", "parallel_drafting", "parallel_drafting_spec")
BRANCHES, DEPTH = "num_branches", "depth"  # of parallel_drafting_spec
HARMLESS = (  # they tune vLLM, not the answer
    "max_model_len",
    "enforce_eager",
    "disable_padded_drafter_batch",
    "use_local_argmax_reduction",
    "revision",
    "code_revision",
    "attention_backend",
    "moe_backend",
)
REFUSED = {
    "draft_tensor_parallel_size": "the native engine runs on one device: use 1 or leave it out",
    "quantization": "a drafter runs in the target's dtype: leave it out",
    "disable_by_batch_size": "automatic K (num_speculative_tokens left out) follows the load by itself: leave it out",
    "prompt_lookup_max": "there is no n-gram drafting here: leave it out",
    "prompt_lookup_min": "there is no n-gram drafting here: leave it out",
    "speculative_token_tree": "trees have no fixed shape here: use parallel_drafting_spec, or --tree",
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    drafter: str | None = None
    method: Method | None = None
    k: int | None = None
    parallel: bool | None = None
    tree: int | None = None  # nodes
    more: Mapping[str, Any] = field(default_factory=dict)  # keys for vLLM alone


def parse_speculative_config(
    text: str, source: str = "--speculative-config", vllm: bool = False
) -> SpeculativeConfig:
    """`vllm`: keys we do not use are vLLM's to judge."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise UserError(
            f'{source} must be an object like {{"model": "DIR", "num_speculative_tokens": 7}}'
        )
    more = {key: value for key, value in given.items() if key not in USED} if vllm else {}
    for key, value in given.items():
        if key not in more:
            check_key(key, value, source)
    parallel = given.get("parallel_drafting")
    if parallel is not None and not isinstance(parallel, bool):
        raise UserError(f"{source}: parallel_drafting must be true or false, not {parallel!r}")
    k, tree = k_of(given, source), None
    if (spec := given.get("parallel_drafting_spec")) is not None:
        if vllm:
            raise UserError(
                f"{source}: no vLLM has parallel_drafting_spec: use parallel_drafting, or --engine native"
            )
        if parallel is False:
            raise UserError(
                f"{source}: parallel_drafting_spec needs parallel_drafting: leave out its false"
            )
        given, parallel = given | {"parallel_drafting": True}, True
        k, tree = tree_of(spec, k, source)
    return SpeculativeConfig(drafter_of(given, source), method_of(given, source), k, parallel, tree, more)


def check_key(key: str, value: Any, source: str) -> None:
    if (
        key in REFUSED
        and value not in (None, False)
        and not (key == "draft_tensor_parallel_size" and value == 1)
    ):
        raise UserError(f"{source}: {key} cannot be honored: {REFUSED[key]}")
    if key not in (*USED, *HARMLESS, *REFUSED):
        known = [*USED, *HARMLESS, *REFUSED]
        raise UserError(
            f"{source}: unknown key {key!r}: use {', '.join(USED)}.{nearest(key, known)}"
        )


def drafter_of(given: dict[str, Any], source: str) -> str | None:
    model = given.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise UserError(f"{source}: model must be a drafter's folder, not {model!r}")
    return model


def method_of(given: dict[str, Any], source: str) -> Method | None:
    """With `parallel_drafting`, vLLM's eagle3 is P-EAGLE; the drafter's folder says the rest."""
    method = given.get("method")
    if method is None:
        return "p-eagle" if given.get("parallel_drafting") else None
    if method not in METHODS:
        word = str(method)
        raise UserError(
            f"{source}: method {word!r} is not drafted here: use eagle3.{nearest(word, list(METHODS))}"
        )
    if method == "p-eagle" or given.get("parallel_drafting"):
        return "p-eagle"
    return "eagle3"


def k_of(given: dict[str, Any], source: str) -> int | None:
    k = given.get("num_speculative_tokens")
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise UserError(
            f"{source}: num_speculative_tokens is {k!r}: use 1 or more, or leave it out for automatic K"
        )
    return k


def tree_of(spec: Any, k: int | None, source: str) -> tuple[int, int]:
    """K and nodes of a parallel_drafting_spec; 0 nodes: one branch at each depth, which is a chain."""
    where = f"{source}: parallel_drafting_spec"
    if not isinstance(spec, dict) or set(spec) - {BRANCHES, DEPTH} or BRANCHES not in spec:
        raise UserError(
            f'{where} must be like {{"{BRANCHES}": [8, 8, 4, 4, 2, 2, 1], "{DEPTH}": 7}}, not {spec!r}'
        )
    branches, depth = spec[BRANCHES], spec.get(DEPTH, k)
    if depth is None and isinstance(branches, list):
        depth = len(branches)
    if not is_count(depth) or (k is not None and k != depth):
        raise UserError(
            f"{where}: {DEPTH} is {depth!r}: use 1 or more, and the same as num_speculative_tokens"
        )
    listed = isinstance(branches, list)
    if not all(map(is_count, branches if listed else [branches])) or (
        listed and len(branches) != depth
    ):
        raise UserError(
            f"{where}: {BRANCHES} is {branches!r}: use a number of 1 or more, or one for each of {depth} depths"
        )
    nodes = sum(branches) if listed else branches * depth
    return depth, nodes if nodes > depth else 0


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
