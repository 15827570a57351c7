"""Quantized tiny targets, loaded by the compressed-tensors package and by vLLM."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from parity_cases import Case
from parity_models import tiny_target
from safetensors.torch import load_file

from peagle.target import Target, load_target
from peagle.target.quantized.formats import WEIGHT_FORMATS
from peagle.target.quantized.layout import parse_quantized
from peagle.target.quantized.write import quantize

pytestmark = pytest.mark.vllm
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm" / "quantized.py"
CASE = Case("quantized", "p-eagle", 3, sizes={"vocab_size": 96, "max_position_embeddings": 2048})
TOKENS = 8
# The largest mean gap of each format (see `mean_gap`). int8 also rounds the inputs of every
# product, with fewer bits where the CPU has no AVX-512: 0.01 was measured with it, 0.22 without.
MAX_GAPS = {"bf16": 0.05, "int8": 0.5, "int4": 0.05}
# Start a script as if the CPU had only AVX2: vLLM then loads its library for such CPUs.
AVX2_ONLY = (
    "-c",
    "import runpy, sys, torch\n"
    "for name in ('avx512', 'avx512_bf16', 'amx_tile'):\n"
    "    setattr(torch.cpu, f'_is_{name}_supported', lambda: False)\n"
    "sys.argv.pop(0)\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n",
)
AVX2_ENVIRONMENT = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
PROMPTS = [[7, 9, 30, 4], [60, 3, 12, 8, 22], list(range(10, 40)), [1, 2]]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("work")
    tiny_target(CASE, root / "fp32").model.to(torch.bfloat16).save_pretrained(root / "bf16")
    for name, to in WEIGHT_FORMATS.items():
        quantize(root / "bf16", root / name, to)
    (root / "prompts.json").write_text(json.dumps({"tiny": PROMPTS}))
    return root


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_the_package_reads_the_same_weights(name: str, work: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    raw = json.loads((work / name / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    scheme = config.config_groups["group_0"]
    theirs = BaseCompressor.get_value_from_registry(config.format)
    assert theirs.can_compress(torch.nn.Linear, scheme)
    tensors = load_file(work / name / "model.safetensors")
    codes, _ = parse_quantized(tensors)
    assert len(codes) == 8 * 7
    for module, ours in codes.items():
        own = {
            key.removeprefix(f"{module}."): x
            for key, x in tensors.items()
            if key.startswith(f"{module}.")
        }
        assert set(own) == set(theirs.compression_param_names(scheme))
        own["weight_scale"] = own["weight_scale"].float()
        back = theirs.decompress(own, scheme)["weight"]
        assert torch.equal(back.float(), ours.matrix(torch.float32)), module


def run_vllm(
    name: str, work: Path, out: Path, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run vLLM on the prompts in a separate process, started by `launcher`."""
    command = [sys.executable, *launcher, str(SCRIPT), str(work), str(out), "--one", name, "none"]
    command += ["--tokens", str(TOKENS), "--eager"]
    environment = os.environ | (AVX2_ENVIRONMENT if launcher else {})
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def missing_kernel(stderr: str) -> str | None:
    """The line of vLLM's error for a missing kernel, or None.

    Its library for CPUs without AVX-512 has no kernel for int4 weights, which is an error in the
    first pass.
    """
    match = re.search(r"AttributeError: .* has no attribute '(cpu_gemm_wna16)'", stderr)
    return match[0] if match else None


def mean_gap(target: Target, answers: list[list[int]]) -> float:
    """Mean distance of vLLM's tokens from the best ones, in standard deviations of a row of logits.

    0: each token is the most likely one according to our implementation, given the previous ones.
    2.5: tokens are chosen at random. vLLM also rounds inputs, in a way that depends on the CPU, so
    that near ties differ; therefore answers are not compared for equality.
    """
    gaps = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([*prompt, *answer[:-1]])
        logits = target.forward(ids, keep=len(answer)).logits  # [tokens, vocabulary]
        chosen = logits[torch.arange(len(answer)), torch.tensor(answer)]
        gaps.append((logits.amax(-1) - chosen) / logits.std(-1))
    return float(torch.cat(gaps).mean())


@pytest.mark.parametrize(
    ("name", "cpu"),
    [("bf16", "this"), ("int8", "this"), ("int4", "this"), ("int8", "avx2"), ("int4", "avx2")],
)
def test_vllm_answers(name: str, cpu: str, work: Path, tmp_path: Path, figures: list[str]) -> None:
    """vLLM's tokens are the best ones or near ties, also on a CPU with AVX2 only."""
    if cpu == "avx2" and platform.machine() != "x86_64":
        pytest.skip("AVX2 needs x86_64")
    done = run_vllm(name, work, tmp_path / "out.json", AVX2_ONLY if cpu == "avx2" else ())
    has_avx512 = cpu == "this" and torch.cpu._is_avx512_supported()
    if not has_avx512 and (reason := missing_kernel(done.stderr)):
        pytest.skip(f"vLLM without AVX-512: {reason}")
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads((tmp_path / "out.json").read_text())["tiny"]["answers"]
    assert [len(answer) for answer in answers] == [TOKENS] * len(PROMPTS)
    target = load_target(work / name, torch.float32, "cpu")
    gap = mean_gap(target, answers)
    others = mean_gap(target, answers[1:] + answers[:1])
    figures.append(f"quantized, {name}, {cpu} CPU: gap {gap:.3f}, of other answers {others:.3f}")
    assert gap <= MAX_GAPS[name]
    assert others > 2 * max(MAX_GAPS.values()), "the gap does not detect answers to other prompts"


def test_a_missing_kernel_is_recognized() -> None:
    error = "[rank0]: AttributeError: '_OpNamespace' '_C' object has no attribute"
    assert missing_kernel(f"{error} 'cpu_gemm_wna16'\n") is not None
    assert missing_kernel(f"{error} 'cpu_attention'\n") is None
