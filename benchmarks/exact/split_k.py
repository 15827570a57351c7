"""What each product of exact mode costs: one chain, or split-K in a fixed order.

For every matrix and number of rows: microseconds of the fast path, and of exact products with S
chains (batch_invariant/split_k.py), each with the kernel behind it that adds partial sums
(add_norm, also for qkv). Few rows: the best of three widths of tiles, with and without weights
that are loaded early (e). Many rows: our kernel, and the vendor's library (v). `exact` is what the
engine runs without the library. All products with the same S must have equal bits.

`floor`: the time to read the matrix and its rows and to write the result, at 4.3 TB/s.
"""

# mypy: disable-error-code="misc"

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.exact.kernels import DEVICE, microseconds
from benchmarks.exact.part_report import PartReport
from benchmarks.exact.products import MATRICES, fast_product, random_matrix
from peagle.engine.model.weight import Weight
from peagle.kernels.triton.add_norm import add_norm
from peagle.kernels.triton.batch_invariant import gemm, split_k, vendor_gemm
from peagle.kernels.triton.launch.compile_ahead import compile_ahead
from peagle.kernels.triton.skinny_gemm import (
    MAX_ROWS,
    TileSizes,
    early_inputs,
    gated_skinny_gemm,
    skinny_gemm,
)

FEW_ROWS = (1, 8, 16, 32, 64)
MANY_ROWS = (128, 256, 512)
SPLITS = (1, 2, 3, 4, 8)
BYTES_PER_SECOND = 4.3e12
TIMED_RUNS = 24  # in one CUDA graph
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Best:
    """The fastest of several variants of a column."""

    times: dict[str, float] = field(default_factory=dict)  # by column
    tiles: dict[str, str] = field(default_factory=dict)
    unequal: list[str] = field(default_factory=list)

    def add(self, column: str, tiles: str, time: float) -> None:
        if time < self.times.get(column, float("inf")):
            self.times[column] = time
            self.tiles[column] = tiles


class PricedMatrix:
    """Copies of a matrix, so that weights come from memory, and what runs behind a product."""

    def __init__(self, name: str) -> None:
        n, k = MATRICES[name]
        self.name = name
        self.is_gated = name.endswith("gate_up")
        self.is_added = not self.is_gated and not name.endswith("lm_head")
        self.x, weight = random_matrix(n, k, max(MANY_ROWS))
        copies = max(2, min(TIMED_RUNS, (200 << 20) // (2 * n * k)))
        self.weights = [weight.clone() for _ in range(copies)]
        self.residual = torch.zeros(len(self.x), n, dtype=weight.dtype, device=DEVICE)
        self.norm = torch.ones(n, dtype=weight.dtype, device=DEVICE)

    def run(self, product: Product, rows: int, weight: Tensor) -> None:
        result = product(self.x[:rows], weight)
        if self.is_added:
            add_norm(result, self.residual[:rows], self.norm, 1e-5)

    def time(self, product: Product, rows: int) -> float:
        runs = [self.weights[i % len(self.weights)] for i in range(TIMED_RUNS)]
        return microseconds([lambda w=w: self.run(product, rows, w) for w in runs])

    def splits(self) -> list[int]:
        if not self.is_added:
            return [1]
        inputs = self.weights[0].shape[1]
        return [s for s in SPLITS if inputs % (s * 64) == 0 and inputs // s >= 256]

    def floor(self, rows: int) -> float:
        n, k = self.weights[0].shape
        outputs = n // 2 if self.is_gated else n
        return 2e6 * (n * k + rows * (k + outputs)) / BYTES_PER_SECOND

    def fast_product(self) -> Product:
        return lambda x, w: fast_product(self.name, x, Weight(w))()

    def exact_product(self) -> Product:
        """As the engine multiplies where nothing is left to the vendor's library."""
        return gemm.gated_invariant_gemm if self.is_gated else gemm.invariant_gemm

    def expected(self, splits: int) -> Tensor:
        """By our kernel for many rows."""
        if self.is_gated:
            return gemm.gated_invariant_gemm(self.x, self.weights[0])
        return gemm.invariant_gemm(
            self.x, self.weights[0], None, None, gemm.TILES[-1], splits, parallel=True
        )


def few_rows_variants(matrix: PricedMatrix, splits: int) -> dict[tuple[str, str], Product]:
    """By column and tiles."""
    variants: dict[tuple[str, str], Product] = {}
    inputs = matrix.weights[0].shape[1] // splits
    block_k = 128 if inputs % 128 == 0 else 64
    stages = 4 if block_k == 128 else 6
    for tiles in (
        TileSizes(16, 64, 2, 8),
        TileSizes(32, block_k, 2, 6),
        TileSizes(64, block_k, 4, 3 if matrix.is_gated else stages),
    ):
        for wanted in (0, 256, 512):
            if wanted * tiles.block_n > 16384 // (2 if matrix.is_gated else 1):
                continue  # It would fill the registers.
            early = early_inputs(wanted, inputs) if wanted else 0
            sizes = tiles._replace(early=early)
            column = f"S{splits}" + ("+early" if early else "")
            product: Product = lambda x, w, t=sizes: skinny_gemm(x, w, None, None, t, splits)  # noqa: E731
            if matrix.is_gated:
                product = lambda x, w, t=sizes: gated_skinny_gemm(x, w, None, t)  # noqa: E731
            variants[column, str(tuple(sizes))] = product
    return variants


def many_rows_variants(matrix: PricedMatrix, splits: int) -> dict[tuple[str, str], Product]:
    if matrix.is_gated:
        return {
            ("S1", "default"): gemm.gated_invariant_gemm,
            ("S1 vendor", "linear"): lambda x, w: vendor_gemm.vendor_product(x, w, True),
        }
    if splits == 1:
        return {
            ("S1", "default"): lambda x, w: gemm.invariant_gemm(x, w, splits=1),
            ("S1 vendor", "linear"): linear,
        }
    return {
        (f"S{splits}", "one program"): lambda x, w: gemm.invariant_gemm(
            x, w, splits=splits, parallel=False
        ),
        (f"S{splits}", "a program per chain"): lambda x, w: gemm.invariant_gemm(
            x, w, splits=splits, parallel=True
        ),
        (f"S{splits} vendor", "bmm"): lambda x, w: vendor_gemm.split_product(x, w, splits),
        (f"S{splits} vendor", "mm"): lambda x, w: separate_products(x, w, splits),
    }


def separate_products(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    """As split_product, with one launch for each range of inputs."""
    out = torch.empty(splits, len(x), len(weight), dtype=torch.float32, device=x.device)
    for part, a, b in zip(out, x.chunk(splits, 1), weight.chunk(splits, 1), strict=True):
        torch.mm(a, b.t(), out_dtype=torch.float32, out=part)
    return out


def variants_of(matrix: PricedMatrix, splits: int, rows: int) -> dict[tuple[str, str], Product]:
    few = rows <= MAX_ROWS
    return (few_rows_variants if few else many_rows_variants)(matrix, splits)


def price_products(report: PartReport, names: list[str]) -> None:
    for name in names:
        if not report.has_time:
            report.add(price=name, skipped="no time is left")
            continue
        matrix = PricedMatrix(name)
        compile_matrix(matrix)
        expected = {splits: matrix.expected(splits) for splits in matrix.splits()}
        for rows in (*FEW_ROWS, *MANY_ROWS):
            price_rows(report, matrix, rows, expected)
        del matrix, expected
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def compile_matrix(matrix: PricedMatrix) -> None:
    def run_all() -> None:
        for rows in (1, 32, 64, *MANY_ROWS):
            for product in (matrix.fast_product(), matrix.exact_product()):
                matrix.run(product, rows, matrix.weights[0])
            for splits in matrix.splits():
                matrix.expected(splits)
                for product in variants_of(matrix, splits, rows).values():
                    matrix.run(product, rows, matrix.weights[0])

    compile_ahead(run_all, torch.device(DEVICE))


def price_rows(
    report: PartReport, matrix: PricedMatrix, rows: int, expected: dict[int, Tensor]
) -> None:
    best = Best()
    best.times["fast"] = matrix.time(matrix.fast_product(), rows)
    best.times["exact"] = matrix.time(matrix.exact_product(), rows)
    for splits, right in expected.items():
        for (column, tiles), product in variants_of(matrix, splits, rows).items():
            try:
                result = product(matrix.x[:rows], matrix.weights[0])
                if not has_bits(result, right, rows):
                    best.unequal.append(f"{column} {tiles}")
                best.add(column, tiles, matrix.time(product, rows))
            except Exception as error:
                best.unequal.append(f"{column} {tiles}: {error!r}"[:120])
    report.add(
        price=matrix.name,
        rows=rows,
        rule=f"S{1 if matrix.is_gated else split_k.num_splits(matrix.weights[0])}",
        floor=round(matrix.floor(rows), 2),
        us=best.times,
        tiles=best.tiles,
        unequal=best.unequal,
    )


def has_bits(result: Tensor, right: Tensor, rows: int) -> bool:
    right = right[..., :rows, :]
    if result.dim() < right.dim():  # One program has added its chains.
        right = split_k.add_splits(right, result.dtype)
    return torch.equal(result, right)


def price_lines(records: list[dict[str, Any]]) -> list[str]:
    """A table for few rows and one for many, and the variants with other bits."""
    priced = [record for record in records if "price" in record and "us" in record]
    lines: list[str] = []
    for row_counts in (FEW_ROWS, MANY_ROWS):
        chosen = [record for record in priced if record["rows"] in row_counts]
        columns = dict.fromkeys(column for record in chosen for column in record["us"])
        if chosen:
            titles = [column.replace("+early", "e").replace(" vendor", "v") for column in columns]
            lines.append(
                f"{'matrix':15}  rows rule  floor{''.join(f'{x:>7}' for x in titles)}  bits"
            )
            lines += [price_line(record, list(columns)) for record in chosen]
    for record in priced:
        if record["unequal"]:
            lines.append(
                f"{record['price']}, {record['rows']} rows: {'; '.join(record['unequal'])}"
            )
    return lines


def price_line(record: dict[str, Any], columns: list[str]) -> str:
    us = record["us"]
    times = "".join(f"{us[column]:7.1f}" if column in us else "      -" for column in columns)
    bits = f"{len(record['unequal'])} DIFFER" if record["unequal"] else "equal"
    best = min(record["tiles"], key=us.__getitem__, default="")
    head = f"{record['price']:15} {record['rows']:5} {record['rule']:>4} {record['floor']:6.1f}"
    return f"{head}{times}  {bits}  {best} {record['tiles'].get(best, '')}".rstrip()
