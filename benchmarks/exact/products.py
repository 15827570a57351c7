"""The products of exact mode: their bits with any number of rows, and their times."""

# ruff: noqa: B023 - jobs run before the next iteration
# mypy: disable-error-code="misc, arg-type, assignment, call-arg, return-value"

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.exact.kernels import DEVICE, compare, microseconds
from benchmarks.exact.part_report import PartReport
from peagle.engine.model.weight import Weight
from peagle.kernels.triton.batch_invariant import gemm
from peagle.kernels.triton.batch_invariant.split_k import add_splits, num_splits
from peagle.kernels.triton.batch_invariant.vendor_gemm import own_product, vendor_product
from peagle.kernels.triton.launch.compile_ahead import compile_ahead
from peagle.kernels.triton.skinny_gemm import TileSizes, skinny_gemm

MATRICES = {
    "smollm2 qkv": (960, 576),
    "smollm2 out": (576, 576),
    "smollm2 gate_up": (3072, 576),
    "smollm2 down": (576, 1536),
    "smollm2 lm_head": (49152, 576),
    "8b qkv": (6144, 4096),
    "8b out": (4096, 4096),
    "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b lm_head": (128256, 4096),
}
ROW_COUNTS = (1, 2, 7, 8, 16, 64, 65, 128, 512, 2048)
TIMED_ROWS = (1, 8, 64, 128, 512, 1024, 2048)
VENDOR_ROWS = (65, 72, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1000, 1024, 1536, 2048)
CHAIN_TILES = (
    TileSizes(16, 64, 2, 8),
    TileSizes(16, 128, 2, 6),
    TileSizes(16, 128, 4, 6),
    TileSizes(32, 64, 2, 8),
    TileSizes(32, 128, 2, 6),
    TileSizes(32, 128, 4, 4),
    TileSizes(64, 128, 4, 4),
    TileSizes(64, 64, 4, 6),
)


def product_jobs(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None
) -> dict[str, Callable[[], Tensor]]:
    jobs: dict[str, Callable[[], Tensor]] = {}
    for count in [count for count in ROW_COUNTS if count <= len(x)]:
        jobs[f"{count} rows"] = lambda c=count: whole_product(x[:c], weight, bias, scales)
    for tiles in (gemm.FEW_ROWS_TILES, *gemm.TILES):
        jobs[f"tiles {tile_name(tiles)}"] = lambda t=tiles: whole_product(
            x, weight, bias, scales, t
        )
    splits = num_splits(weight)
    for tiles in chain_choices(len(weight), weight.shape[1] // splits):
        jobs[f"chain {tuple(tiles)}"] = lambda t=tiles: add_splits(
            skinny_gemm(x[:64], weight, bias, scales, t, splits), x.dtype
        )
    return jobs


def whole_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    tiles: gemm.GemmTiles | None = None,
) -> Tensor:
    return add_splits(gemm.invariant_gemm(x, weight, bias, scales, tiles), x.dtype)


def chain_choices(outputs: int, inputs: int) -> list[TileSizes]:
    if outputs % 64:
        return []
    return [tiles for tiles in CHAIN_TILES if inputs % tiles.block_k == 0]


def gated_jobs(x: Tensor, weight: Tensor, scales: Tensor | None) -> dict[str, Callable[[], Tensor]]:
    jobs: dict[str, Callable[[], Tensor]] = {}
    for count in [count for count in ROW_COUNTS if count <= len(x)]:
        jobs[f"{count} rows"] = lambda c=count: gemm.gated_invariant_gemm(x[:c], weight, scales)
    for tiles in (gemm.FEW_ROWS_TILES, *gemm.GATED_TILES):
        jobs[f"tiles {tile_name(tiles)}"] = lambda t=tiles: gemm.gated_invariant_gemm(
            x, weight, scales, t
        )
    return jobs


def random_matrix(n: int, k: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(n + k)
    x = torch.randn(rows, k, generator=generator, device=DEVICE)
    # Outliers, as hidden states have them.
    x[:, ::97] *= 30
    weight = torch.randn(n, k, generator=generator, device=DEVICE) / k**0.5
    return x.bfloat16(), weight.bfloat16()


def check_products(report: PartReport, rows: int) -> None:
    for name, (n, k) in MATRICES.items():
        x, weight = random_matrix(n, k, rows)
        if name.endswith("gate_up"):
            jobs = gated_jobs(x, weight, None)
            report.add(
                bits=name,
                differing=compare(jobs, lambda x=x, w=weight: gemm.gated_invariant_gemm(x, w)),
            )
            continue
        jobs = product_jobs(x, weight, None, None)
        expected = jobs.pop(f"{rows} rows")
        report.add(bits=name, differing=compare(jobs, expected))
        torch.cuda.empty_cache()


def check_variants(report: PartReport, rows: int) -> None:
    """Biases, 8-bit weights, and outputs that fill no tile."""
    for name, n, k, dtype in (
        ("bias", 1152, 896, torch.bfloat16),
        ("bias, splits", 3584, 3584, torch.bfloat16),
        ("int8", 4096, 4096, torch.int8),
        ("fp8", 4096, 4096, torch.float8_e4m3fn),
        ("int8 gated", 8192, 4096, torch.int8),
        ("odd outputs", 1000, 576, torch.bfloat16),
    ):
        x, weight = random_matrix(n, k, rows)
        scales = None
        if dtype != torch.bfloat16:
            weight = (weight.float() * 60 * k**0.5 / 3).clamp(-120, 120).to(dtype)
            scales = torch.rand(n, device=DEVICE) + 0.5
        if name.endswith("gated"):
            jobs = gated_jobs(x, weight, scales)
            expected = lambda x=x, w=weight, s=scales: gemm.gated_invariant_gemm(x, w, s)  # noqa: E731
        else:
            bias = torch.randn(n, device=DEVICE).bfloat16() if n != 1000 else None
            jobs = product_jobs(x, weight, bias, scales)
            expected = jobs.pop(f"{rows} rows")
        report.add(bits=name, differing=compare(jobs, expected))


def check_vendor(report: PartReport) -> None:
    """For which numbers of rows the vendor's library gives the same bits."""
    for name, (n, k) in MATRICES.items():
        x, weight = random_matrix(n, k, max(VENDOR_ROWS))
        expected = own_product(x, weight, gated=False)
        differing = [
            rows
            for rows in VENDOR_ROWS
            if not torch.equal(vendor_product(x[:rows], weight, False), expected[..., :rows, :])
        ]
        report.add(vendor=name, differing_rows=differing)


def time_products(report: PartReport, names: list[str]) -> None:
    for name in names:
        n, k = MATRICES[name]
        copies = max(2, min(30, (200 << 20) // (2 * n * k)))
        x, weight = random_matrix(n, k, max(TIMED_ROWS))
        weights = [weight.clone() for _ in range(copies)]
        wrapped = [Weight(w) for w in weights]
        for rows in TIMED_ROWS:
            if name.endswith("lm_head") and rows > 1024:
                continue
            few = x[:rows]
            variants = product_variants(name, rows)
            compile_ahead(
                lambda: [run(few, weight) for run in variants.values()],
                torch.device(DEVICE),
            )
            times = {"fast": microseconds([fast_product(name, few, w) for w in wrapped])}
            for key, run in variants.items():
                try:
                    times[key] = microseconds([lambda w=w, r=run: r(few, w) for w in weights])
                except Exception as error:
                    print(name, key, repr(error)[:200], flush=True)
            report.add(us=name, rows=rows, **times)
        torch.cuda.empty_cache()


def fast_product(name: str, x: Tensor, weight: Weight) -> Callable[[], Tensor]:
    if name.endswith("gate_up"):
        return lambda: weight.gated(x)
    return lambda: weight(x) if name.endswith("lm_head") else weight.split_k(x)


def product_variants(name: str, rows: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    variants: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    is_gated = name.endswith("gate_up")
    if is_gated:
        variants["exact"] = gemm.gated_invariant_gemm
        choices = gemm.GATED_TILES if rows > 64 else ()
        for tiles in choices:
            variants[tile_name(tiles)] = lambda x, w, t=tiles: gemm.gated_invariant_gemm(
                x, w, None, t
            )
        return variants
    variants["exact"] = gemm.invariant_gemm
    for tiles in gemm.TILES if rows > 64 else ():
        variants[tile_name(tiles)] = lambda x, w, t=tiles: gemm.invariant_gemm(x, w, tiles=t)
    if rows <= 64 and not name.endswith("lm_head"):
        for tiles in chain_choices(*MATRICES[name]):
            variants[str(tuple(tiles))] = lambda x, w, t=tiles: skinny_gemm(x, w, None, None, t, 1)
    return variants


def tile_name(tiles: gemm.GemmTiles) -> str:
    return f"{tiles.block_n}x{tiles.block_t}x{tiles.block_k}w{tiles.num_warps}s{tiles.num_stages}"
