"""What a step costs: random weights of a given shape, and drafts accepted with given probabilities.

Speed depends on shapes and on how many drafts are accepted, not on the text; so a shape can be
measured before there are weights, and compared with another server under the same conditions.
Throughput counts the tokens of every request from the moment the first is added to the moment the
last has ended, prefills included.
"""

import gc
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from peagle.bench.shapes import expert_count
from peagle.core import DRAFTER_METHODS, Method
from peagle.engine import Engine, EngineConfig
from peagle.engine.gc_tuning import freeze_live_objects
from peagle.engine.step.step_measurements import ExpertLoad
from peagle.kernels.stored_matrix import table_bytes
from peagle.loaded import LoadedPair
from peagle.model_pair import ModelPair
from peagle.target.gguf.modules import weight_bytes as module_bytes

# The share of drafts accepted at each position: Qwen3-8B on gsm8k, acceptance length 3.42.
PROFILE = (0.78, 0.59, 0.43, 0.29, 0.18, 0.10, 0.05)
H200_BYTES_PER_SECOND = 4.3e12


@dataclass(frozen=True, slots=True)
class StepCell:
    """One method at one concurrency."""

    shape: str
    method: Method
    k: str
    tree: int  # nodes of the largest tree that may be drafted; 0: chains only
    concurrency: int
    tokens_per_second: float  # of the best run
    mean_tokens_per_second: float  # of all runs, whose acceptance differs
    acceptance_length: float  # of all runs, the one that warms up included
    step_ms: float  # mean of the best run
    # Parts of a step with the K used most; None where the step cannot be split.
    target_ms: float | None
    drafter_ms: float | None
    rest_ms: float | None
    # Reading the weights of target and drafter once, at the given bandwidth; of experts, those
    # that the pass touched.
    floor_ms: float
    # Per mixture layer, in one more pass with the K used most; None: not counted, as in dense
    # targets and in layers of transformers. The floor then counts all experts.
    experts_touched: float | None
    experts: int | None  # of a layer; None for dense targets
    k_steps: dict[int, int]  # drafted tokens -> number of steps

    def to_json(self) -> dict[str, Any]:
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What an engine is timed with."""

    prompts: list[list[int]]
    output: int  # tokens of an answer, the maximum unless `ignore_eos`
    ignore_eos: bool
    repeats: int
    bytes_per_second: float  # memory bandwidth


def conditional_probabilities(profile: Sequence[float]) -> list[float]:
    """The share accepted at each position, given that the positions before were accepted."""
    return [
        share / previous if previous else 0.0
        for previous, share in zip([1.0, *profile], profile, strict=False)
    ]


def measure_random(
    pair: LoadedPair,
    method: Method,
    k: int | str,
    concurrency: int,
    profile: Sequence[float] = PROFILE,
    prompt: int = 128,
    output: int = 256,
    repeats: int = 3,
    bandwidth: float = H200_BYTES_PER_SECOND,
    int8: bool = False,
    tree: int = 0,
) -> StepCell:
    """Random prompts, with drafts accepted by the profile. The best of `repeats` runs counts.

    The profile is that of chains; what trees accept follows from it
    (engine/sampling/forced_acceptance.py).
    """
    rng = random.Random(0)
    prompts = [
        [rng.randrange(pair.target.vocab_size) for _ in range(prompt)] for _ in range(concurrency)
    ]
    engine = build_engine(pair, method, k, concurrency, prompt + output, int8, tree)
    engine.force_acceptance(conditional_probabilities(profile))
    engine.warm_up()
    return time_engine(engine, k, StepLoad(prompts, output, True, repeats, bandwidth))


def measure_prompts(
    pair: LoadedPair,
    method: Method,
    k: int | str,
    concurrency: int,
    prompts: list[list[int]],
    output: int = 256,
    repeats: int = 1,
    bandwidth: float = H200_BYTES_PER_SECOND,
    int8: bool = False,
    tree: int | None = None,
) -> StepCell:
    """Real prompts and a real drafter. A waiting request starts as soon as another has ended."""
    length = max(map(len, prompts)) + output
    engine = build_engine(pair, method, k, concurrency, length, int8, tree)
    engine.warm_up()
    return time_engine(engine, k, StepLoad(prompts, output, False, repeats, bandwidth))


def build_engine(
    pair: LoadedPair,
    method: Method,
    k: int | str,
    concurrency: int,
    length: int,
    int8: bool = False,
    tree: int | None = None,
) -> Engine:
    """`length`: positions of the longest request."""
    config = EngineConfig(
        method=method,
        k=k,
        tree=tree,
        ngram=None if method == "ngram" else False,  # A cell measures the drafter's shapes.
        max_batch=concurrency,
        context=pair.target.fit_context(2 * length),
        kv_tokens=concurrency * (length + 64),
        exact=False,  # The fast path is what is measured.
        prefix_caching=False,
        int8=int8,
        thread=False,
    )
    return Engine(pair, config)


def time_engine(engine: Engine, k: int | str, load: StepLoad) -> StepCell:
    """Run the prompts once to warm up, then `repeats` times; close the engine."""
    run_prompts(engine, load, load.prompts[: 2 * engine.max_batch])
    freeze_live_objects()  # A full collection takes as long as dozens of steps.
    runs = [run_prompts(engine, load, load.prompts) for _ in range(load.repeats)]
    cell = split_step(engine, k, runs, load.bytes_per_second)
    engine.close()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return cell


def run_prompts(
    engine: Engine, load: StepLoad, prompts: Sequence[list[int]]
) -> tuple[float, float]:
    """Tokens per second, and milliseconds of a step."""
    metrics = engine.metrics
    tokens = metrics.generated_tokens
    steps = metrics.steps
    step_seconds = metrics.step_seconds
    start = time.perf_counter()
    for ids in prompts:
        engine.add(ids, max_tokens=load.output, ignore_eos=load.ignore_eos)
    engine.drain()
    elapsed = time.perf_counter() - start
    step_ms = 1000 * (metrics.step_seconds - step_seconds) / (metrics.steps - steps)
    return (metrics.generated_tokens - tokens) / elapsed, step_ms


def split_step(
    engine: Engine, k: int | str, runs: Sequence[tuple[float, float]], bandwidth: float
) -> StepCell:
    """`runs`: tokens per second, and milliseconds of a step."""
    metrics = engine.metrics
    best_speed, step_ms = max(runs)
    usual_nodes = metrics.k_steps.most_common(1)[0][0]
    shape = engine.shape(usual_nodes)
    target_ms, drafter_ms = engine.time_step(engine.max_batch, shape)
    load = engine.expert_load(engine.max_batch, shape)
    step_bytes = weight_bytes(engine.pair, engine.method, usual_nodes, load)
    rest_ms = None
    if target_ms is not None and drafter_ms is not None:
        rest_ms = step_ms - target_ms - drafter_ms
    return StepCell(
        shape=engine.pair.pair.name,
        method=engine.method,
        k=str(k),
        tree=0 if engine.max_shape.is_chain else engine.max_shape.nodes,
        concurrency=engine.max_batch,
        tokens_per_second=best_speed,
        mean_tokens_per_second=sum(speed for speed, _ in runs) / len(runs),
        acceptance_length=metrics.acceptance_length,
        step_ms=step_ms,
        target_ms=target_ms,
        drafter_ms=drafter_ms,
        rest_ms=rest_ms,
        floor_ms=1000 * step_bytes / bandwidth,
        experts_touched=None if load is None else load.touched,
        experts=expert_count(engine.pair.target.config) if load is None else load.experts,
        k_steps=dict(metrics.k_steps),
    )


def weight_bytes(pair: ModelPair, method: Method, k: int, load: ExpertLoad | None = None) -> int:
    """The bytes that a step must read: every matrix, those of the drafter once for each pass.

    `load`: the experts that the target's pass touched; None: all weights of its layers are read.
    """
    layer_bytes = module_bytes(pair.target.layers) if load is None else load.layer_bytes
    target_bytes = layer_bytes + table_bytes(pair.target.head_table)
    if method not in DRAFTER_METHODS:
        return target_bytes
    drafter = pair.drafter(method)
    passes = 1 if method == "p-eagle" or not k else k
    pass_bytes = module_bytes(drafter.layers)
    if k:
        pass_bytes += table_bytes(drafter.head_table)
    return target_bytes + table_bytes(drafter.fc.weight) + passes * pass_bytes


def tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
