"""The logits of every position of a text, computed by the engine's own verifier in one pass."""

import torch
from torch import Tensor

from peagle.engine import Engine
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.verifier import target_kv_shapes
from peagle.kernels.row_pass import RowPass

PAGE_SIZE = 64


@torch.inference_mode()
def score(engine: Engine, ids: list[int]) -> Tensor:
    """[tokens, vocabulary] logits in float32."""
    num_pages = -(-len(ids) // PAGE_SIZE)
    shapes = target_kv_shapes(engine.target)
    kv_cache = KVCache(shapes, num_pages, PAGE_SIZE, torch.device("cpu"))
    positions = torch.arange(len(ids))
    zero = torch.zeros(1, dtype=torch.int32)
    rows = RowPass(
        positions,
        kv_slots=positions,
        page_tables=torch.arange(num_pages)[None].int(),
        row_starts=zero,
        row_counts=zero + len(ids),
        first_positions=zero,
        max_rows=len(ids),
        page_size=PAGE_SIZE,
    )
    logits, _ = engine.loop.stepper.verifier.forward(torch.tensor(ids), rows, kv_cache)
    return logits.float()
