"""The sizes of an engine: the largest draft shape, KV pages, prefill chunks, the stepper."""

import torch

from peagle.core import Method
from peagle.draft_shape import (
    MAX_ADAPTIVE_K,
    MAX_ADAPTIVE_K_NGRAM,
    MAX_ADAPTIVE_K_PARALLEL,
    NO_DRAFT,
    DraftShape,
    check_tree_support,
)
from peagle.drafter import Drafter
from peagle.engine.config import EngineConfig
from peagle.engine.device import is_device_lost
from peagle.engine.model.batch_invariance import launch_invariant_passes
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.verifier import Passes
from peagle.engine.schedule.prompt_rules import PromptRules
from peagle.engine.schedule.scheduler import SchedulerConfig
from peagle.engine.step.exact_mode import expects_exact_mode
from peagle.engine.step.stepper import Stepper
from peagle.engine.step.stepper_size import StepperSize, kv_shapes
from peagle.errors import UserError
from peagle.kernels.cpu.library import DTYPE_SUFFIXES, kernel_state, library
from peagle.model_pair import ModelPair
from peagle.target import Target

KV_MEMORY_FRACTION = 0.85  # Fraction of free GPU memory used for KV pages.
CPU_KV_TOKENS = 1 << 15  # Positions in the KV cache on a CPU, all requests together.
MAX_ADAPTIVE_NODES = 31  # Largest tree that adaptive drafting chooses by default.
GPU_PREFILL_CHUNK = 4096  # Prompt tokens computed per step.
CPU_PREFILL_CHUNK = 512


def supports_trees(drafter: Drafter) -> bool:
    """Trees come out of one parallel pass."""
    return drafter.config.method == "p-eagle"


def uses_ngrams(config: EngineConfig, method: Method, pair: ModelPair) -> bool:
    """Whether requests draft by prompt lookup: always, or beside a drafter."""
    if method == "ngram":
        if config.ngram is False:
            raise UserError(
                "method ngram drafts n-grams only: leave out `ngram`, or use `method` none"
            )
        return True
    if method == "none":
        if config.ngram:
            raise UserError("nothing is drafted with `method` none: set `method` to ngram")
        return False
    if config.ngram is not None:
        return config.ngram
    return pair.target.device.type == "cpu" and config.k == "auto" and not config.tree


def draft_shapes(
    config: EngineConfig, pair: ModelPair, method: Method, drafter: Drafter | None, ngram: bool
) -> tuple[DraftShape, DraftShape]:
    """The largest shape that the drafter drafts, and the largest that is verified."""
    drafter_shape = max_draft_shape(config, pair, drafter)
    if not ngram:
        return drafter_shape, drafter_shape
    on_gpu = pair.target.device.type == "cuda"
    verified = verified_shape(config, method, drafter_shape, on_gpu)
    if method == "ngram" and on_gpu:
        return verified, verified  # Every step has n-gram drafts there.
    return drafter_shape, verified


def verified_shape(
    config: EngineConfig, method: Method, drafter_shape: DraftShape, on_gpu: bool
) -> DraftShape:
    """The shape that no draft exceeds with n-grams among the drafts."""
    if method == "ngram":
        if config.tree:
            check_tree_support(method)
        k = MAX_ADAPTIVE_K_NGRAM if config.k == "auto" else int(config.k)
        return DraftShape(k, k)
    if config.k != "auto" or on_gpu or not drafter_shape.is_chain:
        return drafter_shape
    k = max(MAX_ADAPTIVE_K_NGRAM, drafter_shape.k)
    return DraftShape(k, k)


def max_draft_shape(config: EngineConfig, pair: ModelPair, drafter: Drafter | None) -> DraftShape:
    """The shape that no draft of the drafter exceeds, in depth or in nodes."""
    if drafter is None:
        return NO_DRAFT
    parallel = supports_trees(drafter)
    on_gpu = pair.target.device.type == "cuda"
    nodes = config.tree
    if nodes is None and config.k == "auto" and on_gpu and parallel:
        nodes = MAX_ADAPTIVE_NODES
    k = max_draft_k(config.k, nodes or 0, pair.pair.k, deep=on_gpu and parallel)
    if not nodes:
        return DraftShape(k, k)
    check_tree_support(drafter.config.method)
    return DraftShape(k, nodes)


def max_draft_k(k: int | str, nodes: int, pair_k: int, deep: bool) -> int:
    """The depth that no draft exceeds; `deep`: extra draft rows are nearly free."""
    if k != "auto":
        return int(k)
    limit = max(MAX_ADAPTIVE_K_PARALLEL if deep else MAX_ADAPTIVE_K, pair_k)
    return min(limit, max(nodes - 1, MAX_ADAPTIVE_K)) if nodes else limit


def engine_context(config: EngineConfig, target: Target) -> int:
    """The context of an engine: the configured one, up to the target's."""
    context = min(config.context or target.context, target.context)
    if context < target.shortest_context:
        raise UserError(
            f"`context` is {context}, but the target is loaded for {target.context} tokens, and its"
            f" RoPE has other frequencies for fewer than {target.shortest_context}: load the pair"
            f" with a `context` of {context}, too"
        )
    return context


def prompt_rules(longest: int, context: int, target: Target) -> PromptRules:
    """`longest`: what the KV cache holds of the engine's context."""
    setting = None
    if longest < context:
        setting = "kv_tokens"
    elif longest < target.max_context:
        setting = "context"
    return PromptRules(longest, target.vocab_size, setting)


def kv_page_count(
    config: EngineConfig, pair: ModelPair, drafter: Drafter | None, context: int, nodes: int
) -> int:
    """As many pages as configured, else as fit; never more than the batch can use."""
    page_size = config.page_size
    usable = config.max_batch * -(-(context + nodes + 1) // page_size)
    if config.kv_tokens is not None:
        return max(1, min(usable, -(-config.kv_tokens // page_size)))
    target = pair.target
    if target.device.type != "cuda":
        return min(usable, -(-max(CPU_KV_TOKENS, context + nodes) // page_size))
    page_bytes = page_size * sum(shape.bytes for shape in kv_shapes(target, drafter))
    free_bytes, _ = torch.cuda.mem_get_info(target.device)
    free_bytes -= int(config.reserved_gib * (1 << 30))
    return max(1, min(usable, int(free_bytes * KV_MEMORY_FRACTION) // page_bytes))


def build_stepper(
    config: EngineConfig,
    pair: ModelPair,
    drafter: Drafter | None,
    max_shape: DraftShape,
    context: int,
    ngram: bool,
) -> Stepper:
    num_pages = kv_page_count(config, pair, drafter, context, max_shape.nodes)
    tokens = num_pages * config.page_size
    if not max_shape.is_chain and tokens < 2 * max_shape.nodes:
        raise UserError(
            f"{tokens} KV positions do not hold a tree of {max_shape.nodes} nodes and a prompt:"
            " raise `kv_tokens`, or lower `tree`"
        )
    size = StepperSize(max_shape, num_pages, config.page_size, config.max_batch, context, ngram)
    passes: Passes | None = None
    if expects_exact_mode(config, pair.target):

        def passes(fused: FusedLlamaTarget) -> None:
            launch_invariant_passes(fused, pair.target, config.page_size, max_shape)

    try:
        return Stepper(pair.target, drafter, size, passes)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if "memory" not in str(error).lower() or is_device_lost(error):
            raise
        raise UserError(
            f"{tokens:,} KV positions do not fit into memory: lower `kv_tokens`, `max_batch` or"
            " `context`"
        ) from error


def scheduler_config(
    config: EngineConfig, pair: ModelPair, max_shape: DraftShape, context: int, one_by_one: bool
) -> SchedulerConfig:
    """`one_by_one`: the bits of a request depend on how its passes are divided."""
    on_gpu = pair.target.device.type == "cuda"
    chunk = config.prefill_chunk or (GPU_PREFILL_CHUNK if on_gpu else CPU_PREFILL_CHUNK)
    if one_by_one:
        # In chunks, the bits of a prompt's result would depend on other requests.
        chunk = context * config.max_batch
    return SchedulerConfig(
        config.max_batch,
        chunk,
        config.max_queue,
        context,
        answer_slack=max_shape.nodes,
        context_slack=0 if max_shape.is_chain else max_shape.nodes,
        reserve_pages=one_by_one,
    )


def check_int8(target: Target) -> None:
    if target.device.type != "cpu":
        raise UserError(
            f"int8 runs on a CPU only, and the target is on {target.device.type}: leave out `int8`"
        )
    if library() is None:
        raise UserError(f"int8 needs the C kernels ({kernel_state()}): leave out `int8`")
    if target.dtype not in DTYPE_SUFFIXES:
        dtype = str(target.dtype).removeprefix("torch.")
        raise UserError(
            f"int8 needs a target in bfloat16 or float32, not {dtype}: set `dtype` to one of these,"
            " or leave out `int8`"
        )
