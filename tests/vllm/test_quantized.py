"""Quantized targets, read by the compressed-tensors package and by vLLM, with a tiny target."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parity_cases import Case
from parity_models import tiny_target
from safetensors.torch import load_file

from peagle.target.quantized.formats import WEIGHT_FORMATS
from peagle.target.quantized.layout import parse_quantized
from peagle.target.quantized.write import quantize

pytestmark = pytest.mark.vllm
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm" / "quantized.py"
CASE = Case("quantized", "p-eagle", 3, sizes={"vocab_size": 96, "max_position_embeddings": 2048})
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


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_vllm_answers(name: str, work: Path, tmp_path: Path) -> None:
    """The first tokens are those of our own reading, mostly.

    vLLM also rounds inputs, so a near tie may have another result.
    """
    from peagle.target import load_target

    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), str(work), str(out), "--one", name, "none"]
    command += ["--tokens", "8", "--eager"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(out.read_text())["tiny"]["answers"]
    target = load_target(work / name, torch.float32, "cpu")
    ours = [int(target.forward(torch.tensor(ids), keep=1).logits.argmax()) for ids in PROMPTS]
    assert [len(answer) for answer in answers] == [8] * len(PROMPTS)
    assert sum(answer[0] == own for answer, own in zip(answers, ours, strict=True)) >= 3
