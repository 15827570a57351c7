"""LaunchPlan: how paged attention is cut into programs, and what a launch of it needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionParams

try:
    import triton
except ImportError:  # without Triton the reference runs
    triton = None

MIN_BLOCK_ROWS = 16
MAX_BLOCK_ROWS = 64
MAX_BLOCK_ROWS_FLOAT32 = 32  # float32 runs without tensor cores
LOG2_E = 1.4426950408889634
UNSEEN_SCORE = -1e30  # finite, so that a block of keys without a visible one gives no NaN
KEY_BLOCK_BYTES = 16384  # 64 keys of 128 dimensions in bf16
SHORT_BLOCK_KEYS = 64
SHORT_BLOCK_WARPS = 8
SHORT_BLOCK_STAGES = 2
BUSY_PROGRAMS = 132  # programs that keep a GPU busy
MAX_SPLITS = 8
SPLIT_COUNTERS = 1 << 16  # blocks of a launch that may be split


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    block_rows: int
    blocks: int  # per request and key/value head
    splits: int  # programs per block


def plan_launch(
    heads_in_batch: int, queries: int, element_size: int, splits: int | None
) -> LaunchPlan:
    """Cut `queries` (rows x heads of a group) of each request and key/value head into blocks."""
    max_rows = MAX_BLOCK_ROWS_FLOAT32 if element_size == 4 else MAX_BLOCK_ROWS
    block_rows = min(max(MIN_BLOCK_ROWS, triton.next_power_of_2(queries)), max_rows)
    # The number of splits decides the order of a row's sum: it is chosen before blocks shrink.
    if not splits:
        programs = heads_in_batch * triton.cdiv(queries, block_rows)
        splits = min(max(BUSY_PROGRAMS // programs, 1), MAX_SPLITS)
    if heads_in_batch * triton.cdiv(queries, MIN_BLOCK_ROWS) <= BUSY_PROGRAMS:
        block_rows = MIN_BLOCK_ROWS  # Small blocks spread a small batch over the GPU.
    return LaunchPlan(block_rows, triton.cdiv(queries, block_rows), splits)


def block_sizes(out: Tensor, kv_heads: int, plan: LaunchPlan) -> dict[str, int]:
    heads, d = out.shape[1:]
    block_d = max(16, triton.next_power_of_2(d))
    return {
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "D": d,
        "SPLITS": plan.splits,
        "BLOCK_ROWS": plan.block_rows,
        "BLOCK_D": block_d,
        **key_block_sizes(plan.block_rows, block_d, out.element_size()),
    }


def key_block_sizes(block_rows: int, block_d: int, element_size: int) -> dict[str, int]:
    """Sizes measured on an H200 for the short blocks of a step; longer ones fit the registers."""
    if element_size < 4 and block_rows <= 32:
        return {
            "BLOCK_KEYS": SHORT_BLOCK_KEYS,
            "num_warps": SHORT_BLOCK_WARPS,
            "num_stages": SHORT_BLOCK_STAGES,
        }
    wide = element_size == 4 or block_rows * block_d > 64 * 128
    return {
        "BLOCK_KEYS": min(max(KEY_BLOCK_BYTES // (block_d * element_size), 16), 64),
        "num_warps": 8 if wide else 4,
        "num_stages": 3,
    }


def score_scales(params: AttentionParams) -> tuple[float, float]:
    """The factors of scores before and behind tanh; exponentials are powers of 2."""
    if params.softcap is None:
        return params.scale * LOG2_E, 0.0
    return 2 * params.scale * LOG2_E / params.softcap, params.softcap * LOG2_E


def split_buffers(out: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the splits of a block store: sums of values, largest scores and total weights."""
    if splits == 1:
        return out, out, out
    rows, heads, d = out.shape
    sums = torch.empty(rows, heads, splits, d, dtype=torch.float32, device=out.device)
    return sums, sums.new_empty(rows, heads, splits), sums.new_empty(rows, heads, splits)


def new_split_counters(device: torch.device) -> Tensor:
    """Zeros that count the finished splits of each block; every launch leaves them zero."""
    return torch.zeros(SPLIT_COUNTERS, dtype=torch.int32, device=device)
