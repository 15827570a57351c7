"""What a step costs: random weights of a given shape, and drafts that are accepted as a given profile says.

Speed depends on shapes and on how many drafts are accepted, not on what is said; so a shape can be measured before any
weights are there, and beside another server on the same terms. The tokens of every request are counted from the moment
the first is added to the moment the last has ended, prefills included.
"""

import gc
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from peagle.catalog.pair import Pair, TargetSource
from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.engine import Engine, EngineConfig
from peagle.errors import UserError, did_you_mean
from peagle.loaded import LoadedPair
from peagle.model_pair import ModelPair
from peagle.target import Target

PROFILE = (0.78, 0.59, 0.43, 0.29, 0.18, 0.10, 0.05)  # Qwen3-8B on gsm8k: acceptance length 3.42
BANDWIDTH = 4.3e12  # bytes a second that an H200 reads
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True, slots=True)
class StepCell:
    """One method at one concurrency."""

    shape: str
    method: Method
    k: str
    concurrency: int
    tokens_per_second: float
    acceptance_length: float
    step_ms: float
    target_ms: float | None  # of a step with the largest K in use; None where it cannot be split
    drafter_ms: float | None
    rest_ms: float | None
    floor_ms: float  # reading every weight of target and drafter once, at the bandwidth given
    k_steps: dict[int, int]

    def as_dict(self) -> dict[str, Any]:
        return {
            name: round(x, 4) if isinstance(x, float) else x for name, x in asdict(self).items()
        }


def shape_pair(shape: str, device: str, dtype: torch.dtype, seed: int = 0) -> LoadedPair:
    """A target of that shape with random weights, and random drafters of both methods for it."""
    if shape not in SHAPES:
        raise UserError(
            f"unknown shape {shape!r}: use one of {', '.join(SHAPES)}.{did_you_mean(shape, list(SHAPES))}"
        )
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=dtype)
    target = Target(model, name=shape)
    layers: dict[Method, int] = {"p-eagle": 4, "eagle3": 1}
    drafters = {method: random_drafter(target, method, count) for method, count in layers.items()}
    return LoadedPair(Pair(shape, TargetSource(()), {}, k=7), target, drafters)


def random_drafter(target: Target, method: Method, layers: int) -> Drafter:
    config = config_for(
        target, method, layers, None, mask_token_id=target.vocab_size - 1, trained=False
    )
    with torch.device(target.device):
        drafter = Drafter(config).to(target.dtype)
    drafter.set_embed_and_head(target.embedding, target.lm_head)
    return drafter.eval().requires_grad_(False)


def conditional(profile: Sequence[float]) -> list[float]:
    """The share accepted at each position -> given that those before were."""
    return [
        at / before if before else 0.0 for before, at in zip([1.0, *profile], profile, strict=False)
    ]


def measure(
    pair: LoadedPair,
    method: Method,
    k: int | str,
    concurrency: int,
    profile: Sequence[float] = PROFILE,
    prompt: int = 128,
    output: int = 256,
    repeats: int = 3,
    bandwidth: float = BANDWIDTH,
    int8: bool = False,
) -> StepCell:
    """Random prompts, accepted as the profile says. The best of `repeats` runs, after one to warm up."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(pair.target.vocab_size) for _ in range(prompt)] for _ in range(concurrency)
    ]
    engine = engine_for(pair, method, k, concurrency, prompt + output, int8, tree=0)
    engine.force_acceptance(conditional(profile))
    engine.warm_up()
    return timed(engine, prompts, output, True, k, repeats, bandwidth)


def measure_prompts(
    pair: LoadedPair,
    method: Method,
    k: int | str,
    concurrency: int,
    prompts: list[list[int]],
    output: int = 256,
    repeats: int = 1,
    bandwidth: float = BANDWIDTH,
    int8: bool = False,
) -> StepCell:
    """Real prompts and a real drafter; so many requests at a time, the next as soon as one has ended."""
    engine = engine_for(pair, method, k, concurrency, max(map(len, prompts)) + output, int8)
    engine.warm_up()
    return timed(engine, prompts, output, False, k, repeats, bandwidth)


def engine_for(
    pair: LoadedPair,
    method: Method,
    k: int | str,
    concurrency: int,
    length: int,
    int8: bool = False,
    tree: int | None = None,
) -> Engine:
    config = EngineConfig(
        method=method,
        k=k,
        tree=tree,
        max_batch=concurrency,
        context=min(pair.target.context, 2 * length),
        kv_tokens=concurrency * (length + 64),
        prefix_caching=False,
        int8=int8,
        thread=False,
    )
    return Engine(pair, config)


def timed(
    engine: Engine,
    prompts: list[list[int]],
    output: int,
    ignore_eos: bool,
    k: int | str,
    repeats: int,
    bandwidth: float,
) -> StepCell:
    """Runs the prompts once to warm up, then `repeats` times; closes the engine."""
    pair, method, concurrency, metrics, best = (
        engine.pair,
        engine.method,
        engine.max_batch,
        engine.metrics,
        0.0,
    )
    for i in range(repeats + 1):
        told, steps, seconds = metrics.generated_tokens, metrics.steps, metrics.step_seconds
        start = time.perf_counter()
        for ids in prompts if i else prompts[: 2 * concurrency]:
            engine.add(ids, max_tokens=output, ignore_eos=ignore_eos)
        engine.drain()
        spent = time.perf_counter() - start
        best = max(best, (metrics.generated_tokens - told) / spent) if i else 0.0
    steps, seconds = metrics.steps - steps, metrics.step_seconds - seconds
    used = metrics.k_steps.most_common(1)[0][0]
    target_ms, drafter_ms = engine.time_step(concurrency, engine.shape(used))
    step_ms = 1000 * seconds / steps
    rest = None if target_ms is None or drafter_ms is None else step_ms - target_ms - drafter_ms
    floor = 1000 * weight_bytes(pair, method, used) / bandwidth
    cell = StepCell(
        pair.pair.name,
        method,
        str(k),
        concurrency,
        best,
        metrics.acceptance_length,
        step_ms,
        target_ms,
        drafter_ms,
        rest,
        floor,
        dict(metrics.k_steps),
    )
    engine.close()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return cell


def weight_bytes(pair: ModelPair, method: Method, k: int) -> int:
    """What one step must read: every matrix of the target, and of the drafter as often as it runs."""
    target, total = pair.target, 0
    layers = sum(p.numel() * p.element_size() for p in target.layers.parameters())
    total += layers + target.lm_head.numel() * target.lm_head.element_size()
    if method == "none":
        return total
    drafter = pair.drafter(method)
    blocks = sum(p.numel() * p.element_size() for p in drafter.layers.parameters())
    head = drafter.lm_head.numel() * drafter.lm_head.element_size()
    fc = drafter.fc.weight.numel() * drafter.fc.weight.element_size()
    passes = 1 if method == "p-eagle" or not k else k
    return total + fc + passes * (blocks + (head if k else 0))
