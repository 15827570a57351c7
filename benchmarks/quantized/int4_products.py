"""Our product with 4-bit blocks beside PyTorch's `_weight_int4pack_mm_for_cpu`.

    python -m benchmarks.quantized.int4_products

The 30 layers of SmolLM2-135M, random weights, groups of 32 inputs, milliseconds of the best of
interleaved rounds.
"""

import time

import torch
from torch import Tensor

from peagle.kernels.cpu.library import kernel_state
from peagle.kernels.cpu.matrix import PackedMatrix
from peagle.kernels.stored_matrix import BLOCK_FORMATS, StoredMatrix
from peagle.target.matrix_shapes import DEFAULT_SHAPES

GROUP = 32
MAX_BYTE = 0x40  # of random blocks: their scales are finite
ROWS = (1, 4, 8)
ROUNDS = 10


def our_matrix(n: int, k: int) -> PackedMatrix:
    row_bytes = k // GROUP * BLOCK_FORMATS["Q4_1"].size
    blocks = torch.randint(MAX_BYTE, (n, row_bytes), dtype=torch.uint8)
    return PackedMatrix(StoredMatrix("Q4_1", blocks))


def their_matrix(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The packed weight, and the scale and zero point of each group."""
    codes = torch.randint(16, (n, k), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed, torch.randn(k // GROUP, n, 2).to(dtype)


@torch.inference_mode()
def main() -> None:
    print(f"{kernel_state()}, {torch.get_num_threads()} threads")
    print("| rows | ours | _weight_int4pack_mm_for_cpu |\n|---|--:|--:|")
    shapes = DEFAULT_SHAPES.layer * DEFAULT_SHAPES.num_layers
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    for dtype in (torch.float32, torch.bfloat16):
        ours = [our_matrix(n, k) for n, k in shapes]
        theirs = [their_matrix(n, k, dtype) for n, k in shapes]
        for rows in ROWS:
            inputs = {k: torch.randn(rows, k).to(dtype) for _, k in shapes}
            best = [float("inf")] * 2
            for _ in range(ROUNDS):
                started = time.perf_counter()
                for matrix in ours:
                    matrix(inputs[matrix.k])
                between = time.perf_counter()
                for (packed, scales), (_, k) in zip(theirs, shapes, strict=True):
                    multiply(inputs[k], packed, GROUP, scales)
                ended = time.perf_counter()
                best = [min(best[0], between - started), min(best[1], ended - between)]
            name = str(dtype).removeprefix("torch.")
            print(f"| {rows}, {name} | {1e3 * best[0]:.1f} | {1e3 * best[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
