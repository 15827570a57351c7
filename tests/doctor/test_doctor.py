"""`peagle doctor`: facts about this machine, and reasons for slower kernels."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from peagle.catalog import DEFAULT_PAIR, find_pair
from peagle.cli import app
from peagle.doctor import cpu, examine, gpu, report
from peagle.doctor.cpu import CpuFacts, limitations
from peagle.doctor.software import disk_facts, memory_facts, software_facts
from peagle.target import precision
from peagle.target.gguf.choice import choose_weights
from peagle.target.weight_speed import ROW_COUNTS
from tests.support.models.tiny_models import make_target

AVX512 = CpuFacts("x", "x86_64", ("avx2", "avx512f", "avx512_vnni", "avx512_bf16"), 2, 2, 1 << 20)
TIMES = {name: dict.fromkeys(ROW_COUNTS, 1.5) for name in ("float32", "bfloat16")}


@pytest.fixture(autouse=True)
def without_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fixed times instead of measuring weights, and the kernels that are already compiled."""
    library_state = cpu.library.kernel_state()
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    monkeypatch.setattr(precision, "kernel_state", lambda: library_state)

    monkeypatch.setattr(report, "choose_weights", partial(choose_weights, measure=lambda *_: TIMES))


def reasons(state: str, facts: CpuFacts, **environment: str) -> list[str]:
    return [limit.reason for limit in limitations(state, facts, environment)]


def test_json_output() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts.keys() == {"cpu", "kernels", "auto", "gpu", "memory", "disk", "software"}
    assert facts["cpu"]["threads"] == torch.get_num_threads()
    assert facts["kernels"]["state"] == cpu.library.kernel_state()
    assert facts["auto"]["pair"] == DEFAULT_PAIR and facts["auto"]["chosen"] == "float32"
    assert facts["auto"]["pass_ms"]["bfloat16"] == {"1": 1.5, "4": 1.5, "8": 1.5}
    assert facts["software"]["versions"]["torch"] == torch.__version__


def test_text_output() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for word in ("CPU", "kernels", "dtype auto", "GPU", "memory", "disk", "versions", "OpenMP"):
        assert f"\n{word} " in f"\n{result.stdout}"
    assert "float32: 1 row 1.50, 4 rows 1.50, 8 rows 1.50" in result.stdout


def test_an_unknown_pair_is_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "no-such-pair"])
    assert result.exit_code == 2 and "no-such-pair" in result.output


def test_the_best_machine_has_no_limitation() -> None:
    assert reasons("c, avx512-bf16", AVX512) == []
    assert "the best that there are" in dict(report.kernel_lines(cpu.KernelFacts("c", {}, ())))[""]


def test_a_missing_compiler_is_reported_with_a_fix() -> None:
    (limit,) = limitations("pytorch: no C compiler found (gcc 9 or newer, or clang)", AVX512, {})
    assert "no C compiler" in limit.reason and limit.fix and "apt install gcc" in limit.fix
    assert "PyTorch" in limit.loss


def test_slow_settings_are_reported() -> None:
    state = "pytorch: PEAGLE_NATIVE=0"
    assert reasons(state, AVX512, PEAGLE_NATIVE="0") == ["PEAGLE_NATIVE=0"]
    assert reasons("c, avx2", AVX512, PEAGLE_CPU_LEVEL="avx2") == ["PEAGLE_CPU_LEVEL=avx2"]
    assert reasons("c, avx512-bf16", AVX512, PEAGLE_CPU_LEVEL="native") == []
    one = replace(AVX512, threads=1)
    (limit,) = limitations("c", one, {"OMP_NUM_THREADS": "1"})
    assert limit.reason == "1 of 2 cores are used" and limit.fix == "unset OMP_NUM_THREADS"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), ["avx2"]),
        (("avx2", "fma"), ["avx512f"]),
        (("avx2", "avx512f"), ["avx512_bf16", "avx512_vnni"]),
        (("avx2", "avx512f", "avx512_vnni"), ["avx512_bf16"]),
        (("asimd",), ["asimddp", "bf16"]),
        (("asimd", "asimddp", "bf16"), []),
    ],
)
def test_missing_cpu_instructions_are_reported(flags: tuple[str, ...], expected: list[str]) -> None:
    facts = replace(AVX512, flags=flags)
    assert reasons("c, x", facts) == [f"this CPU has no {flag}" for flag in expected]


def test_reasons_for_a_missing_gpu() -> None:
    assert "no NVIDIA driver" in gpu.missing_reason(None, None)
    assert "built without CUDA" in gpu.missing_reason("580.1", None)
    assert "driver 580.1" in gpu.missing_reason("580.1", "13.0")


def test_memory_limits_of_the_container_are_used(tmp_path: Path) -> None:
    meminfo, limit, use = (tmp_path / name for name in ("meminfo", "limit", "use"))
    meminfo.write_text("MemTotal:  8000 kB\nMemAvailable:  6000 kB\nHugePages_Total: 0\n")
    plain = memory_facts(meminfo, limit, use)
    assert (plain.total_bytes, plain.free_bytes) == (8000 << 10, 6000 << 10)
    limit.write_text("max\n")
    assert memory_facts(meminfo, limit, use) == plain
    limit.write_text(str(1000 << 10))
    use.write_text(str(400 << 10))
    inside = memory_facts(meminfo, limit, use)
    assert (inside.total_bytes, inside.free_bytes) == (1000 << 10, 600 << 10)
    assert memory_facts(tmp_path / "absent").free_bytes is None


def test_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    facts = disk_facts(tmp_path / "a" / "b")
    assert facts.free_bytes > 0 and facts.writable
    file = tmp_path / "file"
    file.write_text("")
    assert not disk_facts(file).writable


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle.doctor import software

    monkeypatch.setitem(software.OPTIONAL_PACKAGES, "serve", ("fastapi", "no-such-package"))
    facts = software_facts({"OMP_WAIT_POLICY": "PASSIVE", "HOME": "/home"})
    assert facts.missing_extras == ["serve"]
    assert facts.environment == {"OMP_WAIT_POLICY": "PASSIVE"}
    text = "\n".join(line for _, line in report.software_lines(facts))
    assert "missing: no-such-package (pip install 'peagle[serve]')" in text


def test_a_gpu_is_described() -> None:
    facts = gpu.GpuFacts("H200", 150 * 10**9, 140 * 10**9, "580.1", "13.0", None, "no triton")
    assert report.gpu_lines(facts) == [
        ("GPU", "H200, 140.0 of 150.0 GB free, driver 580.1, CUDA 13.0, triton not installed"),
        ("", "no triton"),
    ]


def test_examine_downloads_nothing(tmp_path: Path) -> None:
    facts = examine(find_pair(DEFAULT_PAIR))
    assert facts.choice.times == TIMES
    assert not (tmp_path / "targets").exists()


def test_times_of_substitute_shapes_are_marked(tmp_path: Path) -> None:
    """Other shapes are timed if the pair is not pulled, or if its config is not Llama-like."""
    absent = examine(find_pair("qwen3-8b"))
    assert absent.as_dict()["auto"]["note"] == "not pulled: times of SmolLM2-135M's shapes"
    assert f"for qwen3-8b ({absent.shapes_note});" in dict(absent.lines())["dtype auto"]
    folder = tmp_path / "model"
    make_target().model.save_pretrained(folder)
    assert examine(find_pair(str(folder))).shapes_note is None
    (folder / "config.json").write_text("{}")
    note = examine(find_pair(str(folder))).shapes_note
    assert note and note.startswith("its shapes are not known: ")
