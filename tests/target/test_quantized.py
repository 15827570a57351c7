"""Quantized targets: rounding errors, written folders, equal answers with drafts, and errors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner, Result

from peagle.catalog.pair import Pair, TargetSource
from peagle.cli import app
from peagle.engine import Engine, EngineConfig
from peagle.engine.model.weight import Weight
from peagle.errors import UserError
from peagle.loaded import LoadedPair
from peagle.target import Target, load_target
from peagle.target.quantized.codes import QuantizedWeight, concatenate_weights, quantize_matrix
from peagle.target.quantized.formats import WEIGHT_FORMATS
from peagle.target.quantized.layout import pack_codes, parse_quantized, unpack_codes, weight_tensors
from peagle.target.quantized.write import quantize
from tests.support.kernels.cpu_features import needs_c
from tests.support.models.tiny_models import make_drafter, make_target

NAMES = list(WEIGHT_FORMATS)
# Largest relative errors of a random matrix.
MAX_ERRORS = {"fp8": 0.04, "int8": 0.01, "int4": 0.15}
PROMPTS = [[7, 9, 30, 4], [60, 3, 12, 8, 22, 41, 5], list(range(10, 40))]


def save_target(folder: Path, name: str = "llama", **options) -> Path:
    sizes = {"intermediate_size": 64} if name == "llama" else {}  # a multiple of 32, for int4
    make_target(name, **sizes).model.to(torch.bfloat16).save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def folders(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantized")
    for name, to in WEIGHT_FORMATS.items():
        quantize(source, root / name, to)
    return {name: root / name for name in WEIGHT_FORMATS}


@pytest.mark.parametrize("name", NAMES)
def test_rounding_errors_are_small(name: str) -> None:
    to = WEIGHT_FORMATS[name]
    torch.manual_seed(0)
    matrix = torch.randn(16, 256) * torch.logspace(-4, 2, 16)[:, None]
    matrix[5] = 0
    codes = quantize_matrix(matrix, to, to.choose_group_size([256]))
    assert (codes.codes.dtype, codes.scales.dtype) == (to.codes, to.scales)
    assert codes.scales.shape == (16, 2 if name == "int4" else 1)
    back = codes.matrix(torch.float32)
    live = [i for i in range(16) if i != 5]
    assert ((back - matrix).norm(dim=1) <= MAX_ERRORS[name] * matrix.norm(dim=1))[live].all()
    assert not back[5].any()
    assert codes.codes.float().min() >= to.low and codes.codes.float().max() <= to.high


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_clipping_an_outlier_reduces_the_error(name: str) -> None:
    torch.manual_seed(0)
    to = WEIGHT_FORMATS[name]
    matrix = torch.randn(1, 1 << 16)
    matrix[0, 0] = 6.0
    back = quantize_matrix(matrix, to, None).matrix(torch.float32)
    step = 6.0 / to.full_scale
    plain = (matrix / step).round() * step
    assert (back - matrix).square().sum() < 0.9 * (plain - matrix).square().sum()
    assert back.max() < 5.9


def test_packed_words_have_the_first_code_in_the_lowest_bits() -> None:
    codes = torch.tensor(
        [[-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int8
    )
    words = pack_codes(codes, 4)
    assert words.dtype == torch.int32 and [w & 0xFFFFFFFF for w in words[0].tolist()] == [
        0x76543210,
        0xFEDCBA98,
    ]
    assert torch.equal(unpack_codes(words, 4), codes)
    bytes_ = torch.randint(-128, 128, (5, 32), dtype=torch.int8)
    assert torch.equal(unpack_codes(pack_codes(bytes_, 8), 8), bytes_)


@pytest.mark.parametrize("name", NAMES)
def test_codes_round_trip(name: str) -> None:
    to, matrix = (
        WEIGHT_FORMATS[name],
        torch.randn(8, 128, generator=torch.Generator().manual_seed(0)),
    )
    codes = quantize_matrix(matrix, to, to.choose_group_size([128, 192]))
    read, plain = parse_quantized(weight_tensors("a.b", codes, to) | {"norm.weight": torch.ones(3)})
    assert plain.keys() == {"norm.weight"} and read.keys() == {"a.b"}
    assert torch.equal(read["a.b"].codes.float(), codes.codes.float())
    assert torch.equal(read["a.b"].scales, codes.scales)


def test_packed_8_bit_codes_with_one_scale_are_read() -> None:
    """Other tools write such checkpoints."""
    whole = torch.randint(-127, 128, (4, 8), dtype=torch.int8)
    tensors = {"a.weight_packed": pack_codes(whole, 8), "a.weight_shape": torch.tensor([4, 8])}
    codes, _ = parse_quantized(tensors | {"a.weight_scale": torch.tensor([0.5])})
    assert torch.equal(codes["a"].matrix(torch.float32), whole * 0.5) and codes["a"].by_row


def test_groups_divide_every_matrix() -> None:
    assert WEIGHT_FORMATS["int4"].choose_group_size([576, 1536]) == 64
    assert WEIGHT_FORMATS["int4"].choose_group_size([4096, 14336]) == 128
    assert WEIGHT_FORMATS["int8"].choose_group_size([576, 1536]) is None
    assert WEIGHT_FORMATS["int4"].choose_group_size([576, 1536], 32) == 32
    with pytest.raises(UserError, match="a multiple of 32 inputs"):
        WEIGHT_FORMATS["int4"].choose_group_size([48, 64])
    with pytest.raises(UserError, match="a multiple of 128 inputs"):
        WEIGHT_FORMATS["int4"].choose_group_size([576, 1536], 128)
    for name, group in (("int4", 16), ("int8", 64)):
        with pytest.raises(UserError, match=f"{name} does not support a `group` of {group}"):
            WEIGHT_FORMATS[name].choose_group_size([576], group)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_complete(name: str, folders: dict[str, Path], source: Path) -> None:
    folder, to = folders[name], WEIGHT_FORMATS[name]
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert (quantization["format"], quantization["ignore"]) == (to.layout, ["lm_head"])
    group = quantization["config_groups"]["group_0"]
    assert group["weights"]["group_size"] == (32 if name == "int4" else None)
    assert (group["input_activations"] is None) == (name == "int4")
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    kept = {key for key, x in before.items() if x.ndim == 1} | {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    assert all(torch.equal(before[key], after[key]) for key in kept)
    assert sum(key.endswith("weight_scale") for key in after) == 8 * 7
    card = (folder / "README.md").read_text()
    assert to.layout in card and "| matrices | 56 |" in card


@pytest.mark.parametrize("name", NAMES)
def test_weights_equal_the_dequantized_codes(
    name: str, folders: dict[str, Path], source: Path
) -> None:
    target, plain = (
        load_target(folder, torch.float32, "cpu") for folder in (folders[name], source)
    )
    assert (target.format, plain.format) == (name, None)
    codes, _ = parse_quantized(load_file(folders[name] / "model.safetensors"))
    for module, quantized in codes.items():
        weight = target.model.get_submodule(module).weight
        assert torch.equal(weight, quantized.matrix(torch.float32)), module
        before = plain.model.get_submodule(module).weight
        assert (weight - before).norm() <= MAX_ERRORS[name] * before.norm()
        readable = hasattr(target.model.get_submodule(module), "quantized_weight")
        assert readable == (name == "int8"), "the CPU kernel reads int8 codes only"
    assert target.stop_ids == plain.stop_ids


def answers(target: Target, method: str) -> list[list[int]]:
    drafters = {
        m: make_drafter(target, m, 2 if m == "p-eagle" else 1) for m in ("p-eagle", "eagle3")
    }
    for drafter in drafters.values():
        drafter.to(target.dtype)
    pair = LoadedPair(Pair("tiny", TargetSource(order=("folder",)), {}), target, drafters)
    return [pair.generate(ids, 4, method, 24, exact=True).token_ids for ids in PROMPTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_drafts_do_not_change_answers(
    name: str, dtype: torch.dtype, folders: dict[str, Path]
) -> None:
    target = load_target(folders[name], dtype, "cpu")
    plain = answers(target, "none")
    assert len({token for ids in plain for token in ids}) > 4, (
        "the answers hardly vary, so the comparison proves little"
    )
    assert answers(target, "p-eagle") == answers(target, "eagle3") == plain


@needs_c
def test_int8_is_multiplied_by_its_codes_on_a_cpu(folders: dict[str, Path]) -> None:
    weights = {}
    for name in NAMES:
        pair = LoadedPair(
            Pair("tiny", TargetSource(order=("folder",)), {}),
            load_target(folders[name], torch.bfloat16, "cpu"),
        )
        with Engine(
            pair, EngineConfig(method="none", max_batch=1, kv_tokens=64, thread=False)
        ) as engine:
            weights[name] = engine.status()["weights"]
    assert weights == {
        name: name if name == "int8" else f"{name}, multiplied out to bfloat16" for name in NAMES
    }


@needs_c
def test_weight_that_uses_its_codes() -> None:
    """With these scales, only the codes give the right result, and no rounding of the weights."""
    whole = torch.randint(-100, 101, (50, 128), dtype=torch.int8)
    codes = QuantizedWeight(whole, torch.rand(50, 1) + 0.5)
    bias = torch.randn(50).bfloat16()
    weight = Weight(codes.matrix(torch.bfloat16), bias, codes)
    assert weight.use_codes()
    x = torch.randint(-127, 128, (3, 128)).bfloat16()
    x[:, ::32] = 127  # The step of every 32 inputs is 1, so inputs are not rounded.
    expected = x.float() @ codes.matrix(torch.float32).T + bias.float()
    assert torch.allclose(weight(x).float(), expected, rtol=2**-8, atol=1e-2)
    assert not Weight(codes.matrix(torch.bfloat16), bias).use_codes()


def test_merged_codes() -> None:
    first, second = (
        QuantizedWeight(torch.full((2, 4), i, dtype=torch.int8), torch.ones(2, 1) * i)
        for i in (1, 2)
    )
    merged = concatenate_weights([first, second])
    assert merged is not None
    assert merged.codes[:, 0].tolist() == [1, 1, 2, 2] == merged.scales[:, 0].tolist()
    assert concatenate_weights([first, None]) is None
    assert concatenate_weights([first, QuantizedWeight(second.codes, torch.ones(2, 2))]) is None


def test_a_target_in_several_files(tmp_path: Path, folders: dict[str, Path]) -> None:
    source = save_target(tmp_path / "source", max_shard_size="40KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    quantize(source, tmp_path / "out", WEIGHT_FORMATS["int8"])
    assert {f.name for f in source.glob("*.safetensors*")} == {
        f.name for f in (tmp_path / "out").glob("*.safetensors*")
    }
    single, several = (
        load_target(f, torch.float32, "cpu").model.state_dict()
        for f in (folders["int8"], tmp_path / "out")
    )
    assert all(torch.equal(tensor, several[key]) for key, tensor in single.items())


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Tensor], str], object], str]] = {
    "no scale": ("int8", lambda t, m: t.pop(m + ".weight_scale"), "has no weight_scale"),
    "no words' scale": ("int4", lambda t, m: t.pop(m + ".weight_scale"), "has no weight_scale"),
    "no matrix": ("int8", lambda t, m: t.pop(m + ".weight"), "is missing"),
    "plain matrix": (
        "int8",
        lambda t, m: t.update({m + ".weight": t[m + ".weight"].bfloat16()}),
        "matrix in 8 bits",
    ),
    "nan": ("fp8", lambda t, m: t[m + ".weight_scale"].fill_(float("nan")), "not above 0"),
    "negative": ("int4", lambda t, m: t[m + ".weight_scale"].neg_(), "not above 0"),
    "blocks": (
        "fp8",
        lambda t, m: t.update({m + ".weight_scale": torch.ones(2, 2)}),
        "does not fit a matrix",
    ),
    "no shape": ("int4", lambda t, m: t.pop(m + ".weight_shape"), "do not match"),
    "other shape": ("int4", lambda t, m: t[m + ".weight_shape"].add_(1), "in 4 or 8 bits"),
    "zero points": (
        "int8",
        lambda t, m: t.update({m + ".weight_zero_point": torch.zeros(2)}),
        "symmetric",
    ),
    "a tensor less": ("int8", lambda t, m: t.pop("model.norm.weight"), "lacks 1 tensors"),
}


@pytest.mark.parametrize(("name", "edit", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_broken_folders_are_refused(
    name: str, edit, words: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    for file in folders[name].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors, "model.layers.3.mlp.up_proj")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=words):
        load_target(tmp_path, torch.float32, "cpu")


def test_an_unknown_layout_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["int4"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("pack-quantized", "nvfp4-pack-quantized"))
    with pytest.raises(UserError, match="stored as nvfp4-pack-quantized, but only"):
        load_target(tmp_path, torch.float32, "cpu")


def test_targets_that_cannot_be_quantized(
    folders: dict[str, Path], source: Path, tmp_path: Path
) -> None:
    int8 = WEIGHT_FORMATS["int8"]
    broken = save_target(tmp_path / "broken")
    with pytest.raises(UserError, match="quantized already"):
        quantize(folders["fp8"], tmp_path / "out", int8)
    with pytest.raises(UserError, match="another one"):
        quantize(source, source, int8)
    with pytest.raises(UserError, match="has other files"):
        quantize(source, tmp_path, int8)
    with pytest.raises(UserError, match=r"config\.json is missing"):
        quantize(tmp_path, tmp_path / "out", int8)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="not finite"):
        quantize(broken, tmp_path / "out", int8)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["broken"]


def test_the_command(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def run(*args: str) -> Result:
        return CliRunner().invoke(app, ["quantize", str(source), "--out", str(out), *args])

    report = json.loads(run("--format", "int4", "--json").stdout)
    assert (report["format"], report["group"], report["matrices"]) == ("int4", 32, 56)
    assert (
        report["bytes_after"] < report["bytes_before"]
        and 0.05 < report["error"] < report["worst_error"] < 0.15
    )
    again = run("--format", "fp8")  # It may overwrite its own output.
    assert again.exit_code == 0 and load_target(out, torch.float32, "cpu").format == "fp8"
    wrong = run("--format", "fp4")
    assert wrong.exit_code == 2 and "use one of fp8, int8, int4" in wrong.stderr
