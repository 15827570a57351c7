"""benchmarks/engine/moe.py: the line printed for a cell."""

from benchmarks.engine import moe


def test_a_line_names_the_tree() -> None:
    cell = {
        "method": "p-eagle",
        "k": "auto",
        "tree": 31,
        "concurrency": 8,
        "tokens_per_second": 2500.0,
        "mean_tokens_per_second": 2400.0,
        "acceptance_length": 4.4,
        "step_ms": 10.0,
        "floor_ms": 8.0,
        "experts_touched": 31.0,
        "experts": 32,
    }
    line = moe.cell_line(cell)
    assert line.startswith(
        "p-eagle K=auto tree=31 c=8: 2,500 tokens/s (mean 2,400), AL 4.40, 10.00 ms"
    )
    assert "tree" not in moe.cell_line(cell | {"tree": 0})
    assert {"gpt-oss-20b-trees", "qwen3-30b-a3b-trees"} <= {x.name for x in moe.MEASUREMENTS}
