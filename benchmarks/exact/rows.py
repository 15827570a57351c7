"""Whether rows keep their bits in batches of any size on this GPU, and what that costs.

    python -m benchmarks.exact.rows OUT [--seconds 150] [--parts chains,trees]
    python -m benchmarks.exact.rows OUT --parts "attention prices,prices" --seconds 110

`bits`: the products and the attention of batch_invariant/, with each tile size and plan, against
rows computed alone. `times`: microseconds beside those of the fast path, in CUDA graphs. Every
result is printed at once and written to OUT/exact_rows.json. A part that fails is reported, and the
others go on. `prices`: every product with and without split-K (split_k.py), and attention with and
without a second pass; OUT/prices.txt has the table of products.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.exact.attention import check_chains, check_trees
from benchmarks.exact.attention_times import time_attention
from benchmarks.exact.part_report import PartReport
from benchmarks.exact.products import (
    MATRICES,
    ROW_COUNTS,
    check_products,
    check_variants,
    check_vendor,
    time_products,
)
from benchmarks.exact.split_k import price_lines, price_products

MAX_PRICES = 11000  # characters


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--parts", default="")
    options = parser.parse_args()
    torch.manual_seed(0)
    report = PartReport(options.out / "exact_rows.json", options.seconds)
    rows = max(ROW_COUNTS)
    smollm2 = [name for name in MATRICES if name.startswith("smollm2")]
    eight_b = [name for name in MATRICES if name.startswith("8b")]
    parts: dict[str, Callable[[], None]] = {
        "chains": lambda: check_chains(report),
        "trees": lambda: check_trees(report),
        "attention times": lambda: time_attention(report),
        "vendor": lambda: check_vendor(report),
        "products": lambda: check_products(report, rows),
        "8b times": lambda: time_products(report, eight_b),
        "smollm2 times": lambda: time_products(report, smollm2),
        "attention prices": lambda: time_attention(report, all_plans=False),
        "prices": lambda: price_products(report, [*eight_b, *smollm2]),
        "variants": lambda: check_variants(report, 512),
    }
    everything = [name for name in parts if not name.endswith("prices")]
    wanted = options.parts.split(",") if options.parts else everything
    for name in wanted:
        report.run(name, parts[name])
    print_summary(report)


def print_summary(report: PartReport) -> None:
    print("\n== bits")
    for record in report.records:
        if "bits" in record:
            print(f"{record['bits']:40} {'; '.join(record['differing']) or 'all equal'}"[:400])
    print("\n== microseconds")
    for record in report.records:
        if "vendor" in record:
            print(record)
        if "us" in record and "price" not in record:
            rest = {k: v for k, v in record.items() if k != "us"}
            print(f"{record['us']:28} {rest}")
    lines = price_lines(report.records)
    report.file.with_name("prices.txt").write_text("\n".join([*lines, ""]))
    print("\n".join(lines)[:MAX_PRICES])


if __name__ == "__main__":
    main()
