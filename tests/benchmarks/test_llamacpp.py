"""The comparison with llama.cpp: cases, report, worker processes, memory bandwidth, divergence."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.llamacpp.bandwidth import ReadLoop
from benchmarks.llamacpp.cases import CASES, LLAMA_CASES, PEAGLE_CASES, Speeds, baseline_of
from benchmarks.llamacpp.report import case_line, case_record, print_report
from benchmarks.llamacpp.worker import Worker
from benchmarks.quantized.int8_divergence import Measured, Text

ECHO = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["kind"] == "fail":
        sys.exit("out of memory")
    print(json.dumps(request), flush=True)
"""


def speeds(ratio: float) -> dict[str, Speeds]:
    """llama.cpp decodes 100 tokens per second, and peagle `ratio` times as many."""
    slow = {case.name: Speeds([90.0, 100.0, 80.0]) for case in LLAMA_CASES}
    return slow | {case.name: Speeds([100.0 * ratio, 90.0 * ratio]) for case in PEAGLE_CASES}


def test_every_case_has_a_unique_name_and_a_baseline() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in PEAGLE_CASES:
        assert baseline_of(case).engine == "llama.cpp"
        assert baseline_of(case).requests == case.requests


def test_required_ratios_of_one_request() -> None:
    one = [case for case in PEAGLE_CASES if case.kind == "decode" and case.requests == 1]
    bars = {(case.method, case.int8): case.bar for case in one}
    assert bars == {
        ("none", False): 0.7,
        ("none", True): 0.95,
        ("p-eagle", False): 1.5,
        ("p-eagle", True): 1.8,
    }


@pytest.mark.parametrize(("ratio", "verdict"), [(0.7, " ok"), (0.69, " below")])
def test_a_case_is_compared_with_its_required_ratio(ratio: float, verdict: str) -> None:
    case = PEAGLE_CASES[0]
    record = case_record(case, speeds(ratio), {"weight_bytes": 10**8}, bandwidth=2e10)
    assert record["ratio"] == pytest.approx(ratio)
    assert record["ratio_of_medians"] == pytest.approx(95 * ratio / 90, abs=1e-3)
    assert record["bandwidth_share"] == pytest.approx(ratio * 0.5)
    assert case_line(record).endswith(verdict)


def test_bandwidth_shares_exist_for_plain_decoding_only() -> None:
    for case in CASES:
        record = case_record(case, speeds(1), {"weight_bytes": 1}, bandwidth=1e9)
        plain = (case.kind, case.requests, case.method) == ("decode", 1, "none")
        assert (record["bandwidth_share"] is not None) == plain


def test_the_report_lists_skipped_cases(capsys: pytest.CaptureFixture[str]) -> None:
    engine: dict[str, Any] = {"weight_bytes": 10**8, "version": "v", "kernels": "AVX2 = 1 | "}
    record = {
        "environment": {"cpu": "c", "cores": 2, "cpu_flags": ["avx2"], "torch": "2"},
        "threads": 2,
        "peagle": engine | {"dtype": "float32", "weights": "Q4_1"},
        "peagle_int8": {"error": "int8 needs the C kernels"},
        "llama.cpp": engine,
        "bandwidth_bytes_per_second": None,
        "cases": [case_record(case, speeds(2), engine, None) for case in CASES],
        "skipped": {"decode int8": "int8 needs the C kernels"},
    }
    print_report(record)
    text = capsys.readouterr().out
    assert "llama.cpp: AVX2 = 1\n" in text
    assert "peagle_int8: int8 needs the C kernels" in text
    assert "decode int8: not measured" in text
    assert "100.0 MB of weights per pass (float32, weights Q4_1" in text


def test_workers_answer_and_report_errors(tmp_path: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    worker = Worker([sys.executable, str(script)])
    assert worker.ask("decode", prompts=[[1]]) == {"kind": "decode", "prompts": [[1]]}
    with pytest.raises(SystemExit, match="out of memory"):
        worker.ask("fail")
    worker.close()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_read_loop_measures_bandwidth() -> None:
    loop = ReadLoop(threads=2)
    loop.measure(16 << 20)
    assert loop.best is not None and 1e8 < loop.best < 1e13


def test_divergence_from_the_reference() -> None:
    torch.manual_seed(0)
    reference = torch.randn(50, 16)
    same, shifted, other = Measured(), Measured(), Measured()
    same.add(reference, reference)
    shifted.add(reference, reference + 3)  # the same distribution
    other.add(reference, torch.randn(50, 16))
    assert same.result("s", "e").kl == same.result("s", "e").logits == 0
    assert abs(shifted.result("s", "e").kl) < 1e-6 and shifted.result("s", "e").top1 == 1
    result = other.result("s", "e")
    assert result.kl > 0.1 and result.top1 < 0.5 and result.tokens == 50


def test_logits_of_the_answer() -> None:
    text = Text([1, 2, 3], [4, 5])
    rows = text.answer_rows(torch.arange(5)[:, None])
    assert rows.flatten().tolist() == [2, 3]  # These rows predict tokens 4 and 5.
