"""Quantized mixtures of experts: files, stored experts, logits, the command, and errors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import OlmoeConfig
from typer.testing import CliRunner

from peagle.catalog.pair import Pair, TargetSource
from peagle.cli import app
from peagle.core import Method
from peagle.drafter.formats import compact
from peagle.engine.step.stepper import weight_count
from peagle.errors import UserError
from peagle.loaded import LoadedPair
from peagle.target import Target, load_target
from peagle.target.experts.stored_experts import StoredExperts
from peagle.target.quantized.codes import QuantizedWeight
from peagle.target.quantized.formats import WEIGHT_FORMATS
from peagle.target.quantized.layout import parse_quantized
from peagle.target.quantized.write import quantize
from tests.support.models.tiny_models import SIZES, make_drafter, make_target

FORMATS = list(WEIGHT_FORMATS)
LAYERS, EXPERTS = 8, 4
# Architecture -> its block in files, and the names of gate, up and down.
NAMES = {
    "qwen3-moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}
WIDTHS = {"qwen3-moe": {"moe_intermediate_size": 32}, "mixtral": {"intermediate_size": 64}}
MATRIX = "model.layers.3.mlp.experts.1.up_proj"  # of Qwen3-MoE


def save_target(folder: Path, name: str, **options) -> Path:
    target = make_target(name, seed=7, **WIDTHS.get(name, {}))  # seed 7: varied answers
    target.model.to(torch.bfloat16).save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each mixture in `source`, and in a folder for each format."""
    root = tmp_path_factory.mktemp("mixtures")
    for name in NAMES:
        save_target(root / name / "source", name)
        for format, to in WEIGHT_FORMATS.items():
            quantize(root / name / "source", root / name / format, to)
    return root


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def expert_matrices(name: str, layer: int, weights: dict[str, QuantizedWeight]) -> list[Tensor]:
    """gate_up_proj [E, 2I, d] and down_proj [E, d, I] of transformers, dequantized."""
    block, gate, up, down = NAMES[name]
    dense = {key: weight.matrix(torch.float32) for key, weight in weights.items()}
    prefix = f"model.layers.{layer}.{block}.experts"
    gate_up = [
        torch.cat([dense[f"{prefix}.{e}.{gate}"], dense[f"{prefix}.{e}.{up}"]])
        for e in range(EXPERTS)
    ]
    return [
        torch.stack(gate_up),
        torch.stack([dense[f"{prefix}.{e}.{down}"] for e in range(EXPERTS)]),
    ]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_files_have_every_expert(name: str, format: str, root: Path) -> None:
    folder, source = root / name / format, root / name / "source"
    block, *projections = NAMES[name]
    routers = [f"model.layers.{layer}.{block}.gate" for layer in range(LAYERS)]
    before, after = read_tensors(source), read_tensors(folder)
    assert all(torch.equal(before[f"{x}.weight"], after[f"{x}.weight"]) for x in routers)
    weights, _ = parse_quantized(after)
    assert len(weights) == LAYERS * (4 + EXPERTS * 3)
    for projection in projections:
        matrix = f"model.layers.7.{block}.experts.3.{projection}"
        error = weights[matrix].matrix(torch.float32) - before[f"{matrix}.weight"].float()
        assert 0 < error.norm() < 0.1 * before[f"{matrix}.weight"].float().norm()
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert quantization["ignore"] == ["lm_head", *routers]
    card = (folder / "README.md").read_text()
    assert "| matrices | 128, 96 of them of experts |" in card and "lm_head, routers, norms" in card


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_merged_experts_of_a_source_are_split(
    name: str, format: str, root: Path, tmp_path: Path
) -> None:
    source = save_target(tmp_path / "source", name, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in read_tensors(source)
    quantize(source, tmp_path / "out", WEIGHT_FORMATS[format])
    split, merged = read_tensors(root / name / format), read_tensors(tmp_path / "out")
    assert split.keys() == merged.keys()
    assert all(torch.equal(split[key], merged[key]) for key in split)


@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_8_bit_experts_stay_as_stored(name: str, format: str, root: Path) -> None:
    target = load_target(root / name / format, torch.bfloat16, "cpu")
    weights, _ = parse_quantized(read_tensors(root / name / format))
    d, width = SIZES["hidden_size"], next(iter(WIDTHS[name].values()))
    for layer in range(LAYERS):
        experts = target.layers[layer].mlp.experts
        assert isinstance(experts, StoredExperts) and not list(experts.parameters())
        expected = expert_matrices(name, layer, weights)
        shapes = [(EXPERTS, 2 * width, d), (EXPERTS, d, width)]
        for matrices, dense, shape in zip(
            (experts.gate_up, experts.down), expected, shapes, strict=True
        ):
            assert matrices.scales is not None and matrices.scales.dtype == torch.float32
            assert matrices.weight.dtype == WEIGHT_FORMATS[format].codes
            assert (matrices.weight.shape, matrices.scales.shape) == (shape, shape[:2])
            for e in range(EXPERTS):
                assert torch.equal(matrices.dense(e, torch.float32), dense[e])
    assert target.dtype == torch.bfloat16 and target.format == format
    private = target.private_model().get_submodule("model.layers.0.mlp.experts")
    assert private.gate_up_weight is target.layers[0].mlp.experts.gate_up_weight
    plain = load_target(root / name / "source", torch.bfloat16, "cpu")
    assert weight_count(target.layers) == weight_count(plain.layers)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_dequantized_weights(name: str, format: str, root: Path) -> None:
    target = load_target(root / name / format, torch.float32, "cpu")
    expected = load_target(root / name / "source", torch.float32, "cpu")
    weights, _ = parse_quantized(read_tensors(root / name / format))
    linear = [key for key in weights if "experts" not in key]
    assert len(linear) == LAYERS * 4
    for key in linear:
        layer = expected.model.get_submodule(key)
        layer.weight.data = weights[key].matrix(torch.float32)
    for layer in range(LAYERS):
        gate_up, down = expert_matrices(name, layer, weights)
        experts = expected.layers[layer].mlp.experts
        experts.gate_up_proj.data, experts.down_proj.data = gate_up, down
    ids = torch.arange(3, 60)
    logits = expected.forward(ids).logits
    assert torch.allclose(target.forward(ids).logits, logits, rtol=0, atol=1e-4)
    plain = load_target(root / name / "source", torch.float32, "cpu")
    assert (plain.forward(ids).logits - logits).abs().max() > 1e-2, (
        "rounding must change the logits"
    )


def copy_edited(folder: Path, to: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(to / "model.safetensors")
    edit(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def store_in_groups(tensors: dict[str, Tensor]) -> None:
    scales = tensors[f"{MATRIX}.weight_scale"]
    tensors[f"{MATRIX}.weight_scale"] = torch.cat([scales, scales], 1)


def test_experts_in_groups_are_dequantized(root: Path, tmp_path: Path) -> None:
    """Other tools write groups, but the kernels for experts read one scale per output."""
    stored = root / "qwen3-moe" / "int8"
    target = load_target(copy_edited(stored, tmp_path, store_in_groups), torch.float32, "cpu")
    types = [type(layer.mlp.experts).__name__ for layer in target.layers]
    assert types == ["Qwen3MoeExperts" if i == 3 else "StoredExperts" for i in range(LAYERS)]
    ids = torch.arange(3, 40)
    expected = load_target(stored, torch.float32, "cpu").forward(ids).logits
    assert torch.allclose(target.forward(ids).logits, expected, rtol=0, atol=1e-4)


def test_experts_that_are_not_quantized_are_loaded(root: Path, tmp_path: Path) -> None:
    """Other tools may leave the experts of a layer unquantized."""
    plain = read_tensors(root / "mixtral" / "source")
    prefix = "model.layers.2.block_sparse_moe.experts."

    def restore(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(prefix)]:
            del tensors[key]
        tensors |= {key: x for key, x in plain.items() if key.startswith(prefix)}

    target = load_target(
        copy_edited(root / "mixtral" / "fp8", tmp_path, restore), torch.float32, "cpu"
    )
    experts = target.layers[2].mlp.experts
    assert torch.equal(experts.down_proj[3], plain[f"{prefix}3.w2.weight"].float())
    assert isinstance(target.layers[1].mlp.experts, StoredExperts)


def remove_matrix(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{MATRIX}.weight"], tensors[f"{MATRIX}.weight_scale"]


def cut_matrix(tensors: dict[str, Tensor]) -> None:
    for suffix in (".weight", ".weight_scale"):
        tensors[MATRIX + suffix] = tensors[MATRIX + suffix][1:].clone()


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no scale": (lambda t: t.pop(f"{MATRIX}.weight_scale"), "has no weight_scale"),
    "no matrix": (remove_matrix, f"lacks the quantized {MATRIX}.weight"),
    "other shape": (cut_matrix, r"has a matrix \[31, 32\], but the config needs \[32, 32\]"),
    "nan": (lambda t: t[f"{MATRIX}.weight_scale"].fill_(float("nan")), "not above 0"),
    "no router": (lambda t: t.pop("model.layers.3.mlp.gate.weight"), "lacks 1 tensors"),
}


@pytest.mark.parametrize(("edit", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_folders_are_refused(edit, words: str, root: Path, tmp_path: Path) -> None:
    folder = copy_edited(root / "qwen3-moe" / "int8", tmp_path, edit)
    with pytest.raises(UserError, match=words):
        load_target(folder, torch.float32, "cpu")


def test_targets_that_cannot_be_quantized(root: Path, tmp_path: Path) -> None:
    int8 = WEIGHT_FORMATS["int8"]
    with pytest.raises(UserError, match=r"experts of gpt_oss targets.* use mxfp4"):
        quantize(save_target(tmp_path / "gpt-oss", "gpt-oss"), tmp_path / "out", int8)
    OlmoeConfig(**SIZES, num_experts=4).save_pretrained(tmp_path / "olmoe")
    with pytest.raises(UserError, match="nor of experts of a qwen3_moe or mixtral target"):
        quantize(tmp_path / "olmoe", tmp_path / "out", int8)
    (tmp_path / "partial").mkdir()
    source = root / "qwen3-moe" / "source"
    partial = copy_edited(source, tmp_path / "partial", lambda t: t.pop(f"{MATRIX}.weight"))
    with pytest.raises(UserError, match=f"lacks {MATRIX}.weight"):
        quantize(partial, tmp_path / "out", int8)
    assert not (tmp_path / "out").exists()


def answers(target: Target, method: Method) -> list[list[int]]:
    drafters = {"p-eagle": make_drafter(target, "p-eagle", 2)}
    pair = LoadedPair(Pair("tiny", TargetSource(order=("folder",)), {}), target, drafters)
    prompts = [[7, 9, 30, 4], [60, 3, 12, 8, 22, 41, 5], list(range(10, 40))]
    return [pair.generate(ids, 4, method, 24).token_ids for ids in prompts]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_do_not_change_answers(name: str, root: Path) -> None:
    target = load_target(root / name / "int8", torch.float32, "cpu")
    plain = answers(target, "none")
    assert len({token for ids in plain for token in ids}) > 4, (
        "the answers hardly vary, so the comparison proves little"
    )
    assert answers(target, "p-eagle") == plain


def test_the_command(tmp_path: Path) -> None:
    """A source in several files; the quantized target is used to export and check a drafter."""
    source = save_target(tmp_path / "source", "mixtral", max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    out = tmp_path / "out"
    options = ["--format", "fp8", "--out", str(out), "--json"]
    done = CliRunner().invoke(app, ["quantize", str(source), *options])
    report = json.loads(done.stdout)
    assert (report["matrices"], report["expert_matrices"]) == (128, 96)
    assert report["bytes_after"] < 0.6 * report["bytes_before"]
    assert {file.name for file in source.iterdir()} < {file.name for file in out.iterdir()}
    target = load_target(out, torch.float32, "cpu")
    compact.save(make_drafter(target, "p-eagle", 2), tmp_path / "drafter", target)
    for command in (["export", "drafter", "exported"], ["check", "drafter"], ["check", "exported"]):
        paths = [str(tmp_path / folder) for folder in command[1:]]
        done = CliRunner().invoke(app, [command[0], *paths, "--target", str(out)])
        assert done.exit_code == 0, done.output
