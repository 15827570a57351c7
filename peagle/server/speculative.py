"""vLLM's speculative config: the JSON of `--speculative-config` and SM_VLLM_SPECULATIVE_CONFIG.

    {"method": "eagle3", "model": "/opt/ml/.../eagle", "num_speculative_tokens": 7,
     "parallel_drafting": true}

`parallel_drafting` makes it P-EAGLE. Keys that the native engine cannot honor are refused; keys
that make no difference to it are ignored.

    {"model": "DIR", "parallel_drafting_spec": {"num_branches": [8, 8, 4, 4, 2, 2, 1], "depth": 7}}

asks the native engine for a draft tree of that depth, with as many nodes as `num_branches` has in
sum. The engine decides in every step which branches get the nodes, by their probability of being
accepted. A single number holds for every depth. vLLM has no such key, so it is refused for vLLM.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from peagle.core import Method
from peagle.errors import UserError, did_you_mean

SOURCE = "`speculative_config`"  # the argument, as errors name it
METHODS = ("eagle3", "eagle", "p-eagle")
USED_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "parallel_drafting",
    "parallel_drafting_spec",
)
# Keys of parallel_drafting_spec.
BRANCHES = "num_branches"
DEPTH = "depth"
# Keys that tune vLLM and do not change answers.
IGNORED_KEYS = (
    "max_model_len",
    "enforce_eager",
    "disable_padded_drafter_batch",
    "use_local_argmax_reduction",
    "revision",
    "code_revision",
    "attention_backend",
    "moe_backend",
)
# Keys that the native engine cannot honor, with the reason and the fix.
REFUSED_KEYS = {
    "draft_tensor_parallel_size": "the native engine runs on one device: use 1 or leave it out",
    "quantization": "a drafter runs in the target's dtype: leave it out",
    "disable_by_batch_size": (
        "adaptive drafting (without num_speculative_tokens) follows the load: leave it out"
    ),
    "prompt_lookup_max": "n-gram drafting is not supported: leave it out",
    "prompt_lookup_min": "n-gram drafting is not supported: leave it out",
    "speculative_token_tree": "trees have no fixed shape: use parallel_drafting_spec, or `tree`",
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    drafter: str | None = None
    method: Method | None = None
    k: int | None = None
    parallel_drafting: bool | None = None
    tree: int | None = None  # nodes
    vllm_keys: Mapping[str, Any] = field(default_factory=dict)  # keys that only vLLM reads


def parse_speculative_config(text: str, for_vllm: bool = False) -> SpeculativeConfig:
    """Parse and check the JSON; with `for_vllm`, keys that are not used here are left to vLLM."""
    config = load_object(text)
    vllm_keys = {}
    for key, value in config.items():
        if for_vllm and key not in USED_KEYS:
            vllm_keys[key] = value
        else:
            check_key(key, value)
    parallel = read_parallel(config)
    k = read_k(config)
    tree = None
    if (spec := config.get("parallel_drafting_spec")) is not None:
        check_spec_allowed(parallel, for_vllm)
        parallel = True
        k, tree = read_tree(spec, k)
    return SpeculativeConfig(
        read_drafter(config), read_method(config, bool(parallel)), k, parallel, tree, vllm_keys
    )


def load_object(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{SOURCE} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(
            f'{SOURCE} must be an object like {{"model": "DIR", "num_speculative_tokens": 7}}'
        )
    return config


def check_key(key: str, value: Any) -> None:
    known = [*USED_KEYS, *IGNORED_KEYS, *REFUSED_KEYS]
    if key not in known:
        suggestion = did_you_mean(key, known)
        raise UserError(f"{SOURCE}: unknown key {key!r}: use {', '.join(USED_KEYS)}.{suggestion}")
    is_default = value in (None, False) or (key == "draft_tensor_parallel_size" and value == 1)
    if key in REFUSED_KEYS and not is_default:
        raise UserError(f"{SOURCE}: {key} is not supported: {REFUSED_KEYS[key]}")


def check_spec_allowed(parallel: bool | None, for_vllm: bool) -> None:
    if for_vllm:
        raise UserError(
            f"{SOURCE}: vLLM has no parallel_drafting_spec: use parallel_drafting, or `engine`"
            " native"
        )
    if parallel is False:
        raise UserError(
            f"{SOURCE}: parallel_drafting_spec needs parallel_drafting: leave out its false"
        )


def read_parallel(config: Mapping[str, Any]) -> bool | None:
    parallel = config.get("parallel_drafting")
    if parallel is not None and not isinstance(parallel, bool):
        raise UserError(f"{SOURCE}: parallel_drafting must be true or false, not {parallel!r}")
    return parallel


def read_drafter(config: Mapping[str, Any]) -> str | None:
    model = config.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise UserError(f"{SOURCE}: model must be a drafter's folder, not {model!r}")
    return model


def read_method(config: Mapping[str, Any], parallel: bool) -> Method | None:
    """Return the method: with parallel drafting, vLLM's eagle3 is P-EAGLE."""
    method = config.get("method")
    if method is None:
        return "p-eagle" if parallel else None
    if method not in METHODS:
        suggestion = did_you_mean(str(method), list(METHODS))
        raise UserError(
            f"{SOURCE}: method {str(method)!r} is not supported: use eagle3.{suggestion}"
        )
    return "p-eagle" if method == "p-eagle" or parallel else "eagle3"


def read_k(config: Mapping[str, Any]) -> int | None:
    k = config.get("num_speculative_tokens")
    if k is not None and not is_count(k):
        raise UserError(
            f"{SOURCE}: num_speculative_tokens is {k!r}: use 1 or more, or leave it out for"
            " adaptive drafting"
        )
    return k


def read_tree(spec: Any, k: int | None) -> tuple[int, int]:
    """Return K and the number of nodes of a parallel_drafting_spec.

    One branch at each depth is a chain, which has 0 nodes.
    """
    name = f"{SOURCE}: parallel_drafting_spec"
    if not isinstance(spec, dict) or set(spec) - {BRANCHES, DEPTH} or BRANCHES not in spec:
        example = f'{{"{BRANCHES}": [8, 8, 4, 4, 2, 2, 1], "{DEPTH}": 7}}'
        raise UserError(f"{name} must be like {example}, not {spec!r}")
    branches = spec[BRANCHES]
    depth = spec.get(DEPTH, k)
    if depth is None and isinstance(branches, list):
        depth = len(branches)
    if not is_count(depth) or (k is not None and k != depth):
        raise UserError(
            f"{name}: {DEPTH} is {depth!r}: use 1 or more, and the same as num_speculative_tokens"
        )
    is_list = isinstance(branches, list)
    counts = branches if is_list else [branches]
    if not all(map(is_count, counts)) or (is_list and len(counts) != depth):
        raise UserError(
            f"{name}: {BRANCHES} is {branches!r}: use a number of 1 or more, or one for each of"
            f" {depth} depths"
        )
    nodes = sum(counts) if is_list else branches * depth
    return depth, nodes if nodes > depth else 0


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
