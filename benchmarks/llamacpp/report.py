"""The record of a comparison, and its table."""

import argparse
from typing import TYPE_CHECKING, Any

from benchmarks.llamacpp.cases import LLAMA_CASES, PEAGLE_CASES, Case, Speeds, baseline_of
from peagle.kernels.cpu.library import cpu_features

if TYPE_CHECKING:
    from benchmarks.llamacpp.__main__ import Comparison

FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)


def build_record(
    comparison: "Comparison",
    options: argparse.Namespace,
    speeds: dict[str, Speeds],
    bandwidth: float | None,
) -> dict[str, Any]:
    floats = comparison.peagle.ask("describe", int8=False)
    int8 = comparison.peagle.ask("describe", int8=True)
    llama = comparison.llama[1].ask("describe")
    environment = floats.pop("environment")
    int8.pop("environment", None)
    features = cpu_features().split()
    return {
        "format": "peagle-llamacpp/1",
        "environment": environment | {"cpu_flags": [flag for flag in FLAGS if flag in features]},
        "gguf": options.gguf.name,
        "auto": options.auto,
        "pair": options.pair,
        "threads": options.threads,
        "tokens_per_answer": options.tokens,
        "rounds": options.rounds,
        "bandwidth_bytes_per_second": bandwidth,
        "peagle": floats,
        "peagle_int8": int8,
        "llama.cpp": llama,
        "cases": [
            *(case_record(case, speeds, llama, bandwidth) for case in LLAMA_CASES),
            *(
                case_record(case, speeds, int8 if case.int8 else floats, bandwidth)
                for case in PEAGLE_CASES
                if case.name in speeds
            ),
        ],
        "skipped": comparison.skipped,
    }


def case_record(
    case: Case, speeds: dict[str, Speeds], engine: dict[str, Any], bandwidth: float | None
) -> dict[str, Any]:
    speed = speeds[case.name]
    baseline = speeds[baseline_of(case).name]
    reads_all_weights = case.kind == "decode" and case.requests == 1 and case.method == "none"
    share = None
    if bandwidth and reads_all_weights:
        share = round(engine["weight_bytes"] * speed.best / bandwidth, 3)
    return {
        "workload": case.workload,
        "name": case.name,
        "tokens_per_second": {"best": speed.best, "median": speed.median, "rounds": speed.values},
        "ratio": round(speed.best / baseline.best, 3),
        "ratio_of_medians": round(speed.median / baseline.median, 3),
        "bar": case.bar,
        "bandwidth_share": share,
    }


def print_report(record: dict[str, Any]) -> None:
    environment = record["environment"]
    print(
        f"{environment['cpu']}, {environment['cores']} cores, {record['threads']} threads;"
        f" flags: {' '.join(environment['cpu_flags'])}"
    )
    print(f"torch {environment['torch']}, {record['llama.cpp']['version']}")
    print(f"llama.cpp: {record['llama.cpp']['kernels'].strip(' |')}")
    for name in ("peagle", "peagle_int8", "llama.cpp"):
        print(f"{name}: {describe_engine(record[name])}")
    if (bandwidth := record["bandwidth_bytes_per_second"]) is not None:
        print(f"memory bandwidth, plain read loop: {bandwidth / 1e9:.1f} GB/s")
    print(f"\n{'':58}{'best':>8}{'median':>8}{'ratio':>7}{'(med)':>7}{'bar':>6}{'share':>7}")
    for case in record["cases"]:
        print(case_line(case))
    for name, reason in record["skipped"].items():
        print(f"{name}: not measured: {reason}")


def case_line(case: dict[str, Any]) -> str:
    speed = case["tokens_per_second"]
    bar = case["bar"]
    verdict = "" if bar is None else (" ok" if case["ratio"] >= bar else " below")
    share = "" if case["bandwidth_share"] is None else f"{case['bandwidth_share']:.0%}"
    return (
        f"{case['name']:58}{speed['best']:8.1f}{speed['median']:8.1f}{case['ratio']:7.2f}"
        f"{case['ratio_of_medians']:7.2f}{bar if bar is not None else '':>6}{share:>7}{verdict}"
    )


def describe_engine(engine: dict[str, Any]) -> str:
    if "error" in engine:
        return str(engine["error"])
    line = f"{engine['weight_bytes'] / 1e6:.1f} MB of weights per pass"
    if "dtype" in engine:  # peagle's
        line += f" ({engine['dtype']}, weights {engine['weights']}, kernels {engine['kernels']})"
    return line
