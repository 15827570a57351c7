"""Drafter folders with 4-bit rows: rounding errors, stored tensors, and refused files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact, int4, int8
from peagle.drafter.formats.row_format import EIGHT_BIT, GROUPS, INT4, INT8, RowFormat
from peagle.errors import UserError
from peagle.export.export import same_drafts
from peagle.target import Target
from tests.support.models.tiny_models import add_noise, make_drafter

# Mean squared error of normal weights, relative to their mean square.
NORMAL_ERROR = {16: 0.006, 32: 0.0075, 64: 0.009, 128: 0.011}
TINY = RowFormat(4, 16, ())  # The matrices of the tiny drafter have 32 to 96 columns.
RELEASED = Path(compact.__file__).parents[2] / "drafters"


def tiny_drafter(target: Target) -> Drafter:
    drafter = make_drafter(target, "p-eagle", 2, draft_vocab=40, dependency=32)
    add_noise(drafter, 0.1)
    return drafter


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    compact.save(tiny_drafter(target), tmp_path / "d", target, torch.bfloat16, TINY)
    return tmp_path / "d"


def read_file(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("group", GROUPS)
def test_error_of_normal_weights(group: int) -> None:
    matrix = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    rows = int4.quantize(matrix, group)
    assert [part.dtype for part in rows] == [torch.uint8, torch.int8, torch.float32]
    assert [part.shape for part in rows] == [(128, 256), (128, 512 // group), (128,)]
    error = (int4.dequantize("m", *rows) - matrix).square().mean() / matrix.square().mean()
    assert error < NORMAL_ERROR[group]


def test_no_group_is_worse_than_its_largest_weight_allows() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 4, 32, generator=generator) * torch.logspace(-30, 3, 64)[:, None, None]
    # An outlier, which makes the scales of other groups in its row less precise.
    matrix[3, 1, 7] = 50 * matrix[3].abs().max()
    matrix[5] = 0
    matrix[6, 2] = 0
    back = int4.dequantize("m", *int4.quantize(matrix.view(64, 128), 32)).view_as(matrix)
    group_peak = matrix.abs().amax(2)
    row_peak = group_peak.amax(1, keepdim=True)
    # A weight is off by one step, an eighth of its group's peak; the rounded scale adds 8 / 254
    # of a step of the row's largest group.
    bound = group_peak / 8 + row_peak / 8 * 8 / 254
    assert ((back - matrix).square().mean(2).sqrt() <= bound).all()
    assert not back[5].any() and not back[6, 2].any()


def test_weights_on_the_grid_are_exact() -> None:
    codes = torch.arange(-8, 8).repeat(2).float()  # a group of 32
    matrix = torch.stack([codes * 0.25, codes * -3.0])
    rows = int4.quantize(matrix, 32)
    torch.testing.assert_close(int4.dequantize("m", *rows), matrix, rtol=1e-6, atol=0)
    # The codes -8 and -7 are the nibbles 0 and 1; even columns are in the low nibble.
    assert rows.codes[0, 0] == 0x10 and rows.group_scale.tolist() == [[127], [-127]]


def test_round_trip(target: Target, folder: Path) -> None:
    drafter = tiny_drafter(target)
    assert checkpoint.read(folder).problems() == []
    back = checkpoint.load(folder, target)
    assert back.config == drafter.config
    assert back.target_ids is not None and torch.equal(back.target_ids, drafter.target_ids)
    for name, tensor in drafter.state_dict().items():
        after = back.state_dict()[name]
        if tensor.ndim == 2:
            assert torch.equal(after, int4.dequantize(name, *int4.quantize(tensor, TINY.group))), (
                name
            )
        else:
            assert torch.equal(after, tensor.bfloat16().float()), name
    # Writing rounded weights again changes little.
    compact.save(back, folder, target, torch.bfloat16, TINY)
    again = checkpoint.load(folder, target)
    torch.testing.assert_close(again.fc.weight, back.fc.weight, rtol=0, atol=0.05)
    same, total = same_drafts(drafter, back, 6)
    assert same >= 0.5 * total


def test_stored_tensors(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    assert (raw["format_version"], raw["weights"]) == (1, "int4")
    tensors = read_file(folder)
    matrices = {
        name for name, tensor in tensors.items() if tensor.dtype == torch.uint8 and tensor.ndim == 2
    }
    assert len(matrices) == 2 * 7 + 1 + 3
    for name in matrices:
        assert tensors[name + int4.GROUP_SCALE].dtype == torch.int8
        assert tensors[name + int8.SCALE].dtype == torch.float32
    assert tensors["norm.weight"].dtype == torch.bfloat16
    assert int8.BITS in tensors and "target_ids" not in tensors


@pytest.mark.parametrize(("group", "bits"), [(16, 4.5), (32, 4.25), (64, 4.125)])
def test_size(group: int, bits: float) -> None:
    rows = int4.quantize(torch.randn(256, 512), group)
    size = sum(part.nbytes for part in rows)
    assert size == 256 * 512 * bits / 8 + 4 * 256


def test_some_matrices_keep_8_bits(target: Target, tmp_path: Path) -> None:
    rows = RowFormat(4, 16, (*EIGHT_BIT, "layers.0.mlp"))
    drafter = tiny_drafter(target)
    drafter.embed_tokens = drafter.embed_tokens + 0.5
    compact.save(drafter, tmp_path / "d", target, rows=rows)
    tensors = read_file(tmp_path / "d")
    eight_bit = {"embed_tokens.weight", "fc.weight"} | {
        f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    assert eight_bit == {
        name
        for name, tensor in tensors.items()
        if tensor.dtype == torch.int8 and not name.endswith(int4.GROUP_SCALE)
    }
    back = checkpoint.load(tmp_path / "d", target)
    expected = int8.dequantize("fc", *int8.quantize(drafter.fc.weight.data))
    assert torch.equal(back.fc.weight, expected)


def test_rows_of_incomplete_groups_keep_8_bits(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target, "p-eagle", 1)
    compact.save(drafter, tmp_path / "d", target, rows=INT4)
    assert read_file(tmp_path / "d")["layers.0.mlp.down_proj.weight"].dtype == torch.int8
    assert checkpoint.load(tmp_path / "d", target).config == drafter.config


def test_8_bit_files_load_as_before(target: Target, tmp_path: Path) -> None:
    """A value is its code times the scale of its row."""
    compact.save(tiny_drafter(target), tmp_path / "d", target, rows=INT8)
    stored = read_file(tmp_path / "d")
    scaled = 0
    for name, tensor in checkpoint.read(tmp_path / "d").tensors.items():
        assert isinstance(tensor, Tensor)
        if name + int8.SCALE in stored:
            value = stored[name].float() * stored[name + int8.SCALE][:, None]
            assert torch.equal(tensor, value), name
            scaled += 1
        elif name != "target_ids":
            assert torch.equal(tensor, stored[name]), name
    assert scaled > 5


def test_the_released_heads_are_small() -> None:
    sizes = [file.stat().st_size for file in RELEASED.glob("*/*/model.safetensors")]
    assert len(sizes) >= 3 and max(sizes) <= 16e6 and sum(sizes) <= 28e6


def test_8_bit_files_are_written_as_before(target: Target, tmp_path: Path) -> None:
    drafter = tiny_drafter(target)
    compact.save(drafter, tmp_path / "d", target, rows=INT8)
    tensors = read_file(tmp_path / "d")
    assert not any(name.endswith(int4.GROUP_SCALE) for name in tensors)
    codes, scale = int8.quantize(drafter.fc.weight.data)
    assert torch.equal(tensors["fc.weight"], codes)
    assert torch.equal(tensors["fc.weight.scale"], scale)


SCALES = "fc.weight.group_scale"
DAMAGE = {
    "no row scale": (lambda t: t.pop("fc.weight.scale"), "fc.weight.scale is missing"),
    "no group scale": (lambda t: t.pop(SCALES), "has 4 bits, but fc.weight.group_scale is missing"),
    "no codes": (lambda t: t.pop("fc.weight"), "fc.weight of .* is missing"),
    "nan": (lambda t: t["fc.weight.scale"].fill_(float("nan")), "not above 0"),
    "uneven groups": (lambda t: t.update({SCALES: t[SCALES].repeat(1, 7)[:, :5]}), "equal groups"),
    "no groups": (lambda t: t.update({SCALES: t[SCALES][:, :0]}), "equal groups"),
    "rows": (lambda t: t.update({SCALES: t[SCALES][1:]}), "equal groups"),
    "type": (lambda t: t.update({SCALES: t[SCALES].float()}), "equal groups"),
    "columns": (
        lambda t: t.update({"fc.weight": t["fc.weight"].repeat(1, 2)}),
        "fc.weight has shape",
    ),
    "flat": (lambda t: t.update({"fc.weight": t["fc.weight"].flatten()}), "equal groups"),
}


@pytest.mark.parametrize(("edit", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_broken_files_are_refused(
    folder: Path, target: Target, edit: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    tensors = read_file(folder)
    edit(tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")
    with pytest.raises(UserError, match=words):
        checkpoint.load(folder, target)


def test_a_truncated_file_is_refused(folder: Path, target: Target) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.load(folder, target)


UNKNOWN = {
    "weights": ('"int4"', '"int3"', "stored as 'int3', but this peagle reads float, int8, int4"),
    "version": ('"format_version": 1', '"format_version": 9', "format version 9"),
    "wrong bits": ('"int4"', '"int8"', "group_scale is int8, but .*scale is missing"),
}


@pytest.mark.parametrize(("before", "after", "words"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unknown_formats_are_refused(
    folder: Path, target: Target, before: str, after: str, words: str
) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(UserError, match=words):
        checkpoint.load(folder, target)


def test_weights_that_are_not_finite_are_not_written(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target, "p-eagle", 1)
    drafter.layers[0].mlp.gate_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(UserError, match=r"gate_proj\.weight is not finite"):
        compact.save(drafter, tmp_path / "d", target, rows=INT4)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(("bits", "group", "words"), [(3, 32, "4 or 8"), (4, 24, "one of")])
def test_row_formats_are_checked(bits: int, group: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        RowFormat(bits, group)
