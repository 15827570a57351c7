"""benchmarks/exact/variants.py: the passes and attention plans that it compares."""

from benchmarks.exact.attention_times import Pass
from benchmarks.exact.variants import parse_pass, variants
from peagle.kernels.triton.batch_invariant.attention_plan import AttentionPlan, even_rows


def test_passes_are_parsed() -> None:
    assert parse_pass("64x32t", 395) == Pass(64, 32, 395, True)
    assert parse_pass("1x8", 100) == Pass(1, 8, 100, False)


def test_rows_are_spread_evenly() -> None:
    assert [even_rows(32, most) for most in (21, 10, 5, 32, 64)] == [16, 8, 5, 32, 32]


def test_variants_of_a_tree_fill_their_blocks() -> None:
    chosen = AttentionPlan(21, 64, False, 4, 64)
    plans = variants(chosen, Pass(64, 32, 395, True), group=3)
    limited = AttentionPlan(16, 64, False, 4, 64, max_registers=168)
    assert plans["64 even r168"] == limited
    assert plans["64 even page r168"] == limited._replace(one_page=True)
    assert all(3 * plan.block_rows <= plan.block_queries for plan in plans.values())
    assert "early page w4" in variants(AttentionPlan(5, 16, True, 8), Pass(1, 1, 395), group=3)
