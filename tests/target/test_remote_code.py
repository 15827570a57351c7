"""Code from a checkpoint is never run, and users are not asked whether to trust it."""

import ast
import builtins
import json
from pathlib import Path

import pytest
import torch
from transformers import dynamic_module_utils

from peagle.errors import UserError
from peagle.target.quantized.write import build_without_weights
from peagle.target.target import load_target
from tests.support.models.tiny_models import make_target

ROOT = Path(__file__).parents[2]
LOADERS = ("from_pretrained", "from_config")
WITHOUT_CODE = ("GenerationConfig",)  # reads JSON only
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).write_text("the code of the checkpoint ran")
class CustomConfig(LlamaConfig):
    model_type = "custom"
class CustomModel(LlamaForCausalLM):
    config_class = CustomConfig
class CustomTokenizer(PreTrainedTokenizerFast):
    pass
"""
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Questions to a user at a terminal, who answers "y"."""
    prompts: list[str] = []

    def answer(question: str = "") -> str:
        prompts.append(question)
        return "y"

    monkeypatch.setattr(builtins, "input", answer)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return prompts


def checkpoint_with_code(folder: Path, model: bool, quantized: bool = False) -> Path:
    """Save a tiny Llama with custom code of its model and config, or of its tokenizer.

    Returns the file that the code writes.
    """
    make_target().model.save_pretrained(folder)
    marker = folder / "ran.txt"
    (folder / "custom.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    if model:
        config["model_type"] = "custom"
        config["architectures"] = ["CustomModel"]
        config["auto_map"] = {
            "AutoConfig": "custom.CustomConfig",
            "AutoModelForCausalLM": "custom.CustomModel",
        }
    else:
        tokenizer = {
            "tokenizer_class": "CustomTokenizer",
            "auto_map": {"AutoTokenizer": ["custom.CustomTokenizer", "custom.CustomTokenizer"]},
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if quantized:
        config["quantization_config"] = QUANTIZATION
    (folder / "config.json").write_text(json.dumps(config))
    return marker


@pytest.mark.parametrize(("model", "quantized"), [(True, False), (True, True), (False, False)])
def test_a_target_with_code(
    model: bool, quantized: bool, tmp_path: Path, questions: list[str]
) -> None:
    marker = checkpoint_with_code(tmp_path / "target", model, quantized)
    with pytest.raises(UserError, match="needs code from the checkpoint, which is never run"):
        load_target(tmp_path / "target", torch.float32, "cpu")
    assert questions == [] and not marker.exists()


def test_quantizing_a_target_with_code(tmp_path: Path, questions: list[str]) -> None:
    marker = checkpoint_with_code(tmp_path / "target", model=True)
    with pytest.raises(UserError, match="needs code from the checkpoint, which is never run"):
        build_without_weights(tmp_path / "target")
    assert questions == [] and not marker.exists()


def test_a_custom_model_with_a_known_config(tmp_path: Path, questions: list[str]) -> None:
    """transformers knows the config but has no causal model for it; the custom code has one."""
    marker = checkpoint_with_code(tmp_path / "target", model=True)
    file = tmp_path / "target" / "config.json"
    config = json.loads(file.read_text()) | {"model_type": "clip_vision_model"}
    del config["auto_map"]["AutoConfig"]
    file.write_text(json.dumps(config))
    with pytest.raises(UserError):
        build_without_weights(tmp_path / "target")
    assert questions == [] and not marker.exists()


def unsafe_loaders(source: str) -> list[int]:
    """The lines that mention a loader without calling it with `trust_remote_code=False`.

    A reference to a loader (`load = AutoConfig.from_pretrained`) counts as unsafe, because its
    calls are not visible.
    """
    tree = ast.parse(source)
    safe = {
        id(call.func)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and any(
            keyword.arg == "trust_remote_code"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is False
            for keyword in call.keywords
        )
    }
    return sorted(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in LOADERS
        and id(node) not in safe
        and not (isinstance(node.value, ast.Name) and node.value.id in WITHOUT_CODE)
    )


@pytest.mark.parametrize("folder", ["peagle", "tools", "benchmarks"])
def test_every_loader_refuses_code(folder: str) -> None:
    unsafe = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in unsafe_loaders(path.read_text())
    ]
    assert unsafe == [], "pass trust_remote_code=False"


def test_unsafe_loaders_are_detected() -> None:
    source = (
        "AutoConfig.from_pretrained(x)\n"
        "AutoConfig.from_pretrained(x, trust_remote_code=trust)\n"
        "AutoConfig.from_pretrained(x, trust_remote_code=False)\n"
        "load = transformers.AutoTokenizer.from_pretrained\n"
        "AutoModelForCausalLM.from_config(config, **options)\n"
        "GenerationConfig.from_pretrained(x)\n"
    )
    assert unsafe_loaders(source) == [1, 2, 4, 5]
