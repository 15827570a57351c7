"""Drafter folders with int8 rows: rounding errors, stored tensors, refused files, and readers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact, int8
from peagle.drafter.formats.row_format import INT8
from peagle.drafter.formats.speculators import VerifierConfig
from peagle.errors import UserError
from peagle.export.check import check
from peagle.export.export import export, same_drafts
from peagle.export.vllm_subset import complete_tensors
from peagle.paths import checkpoint_folder
from peagle.target import Target
from tests.support.models.tiny_models import add_noise, make_drafter

VERIFIER = VerifierConfig("tiny", ["LlamaForCausalLM"])
KINDS = {
    "p-eagle full": ("p-eagle", 4, None, {}),
    "p-eagle pruned": ("p-eagle", 3, 40, {"norm_before_fc": True}),
    "p-eagle bias": ("p-eagle", 2, None, {"attention_bias": True}),
    "eagle3 pruned": ("eagle3", 1, 24, {"fc_norm": True, "norm_output": True}),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    method, layers, vocab, switches = request.param
    drafter = make_drafter(target, method, layers, vocab, **switches)
    add_noise(drafter, 0.1)
    return drafter


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    compact.save(
        make_drafter(target, "p-eagle", 2, draft_vocab=40), tmp_path / "d", target, rows=INT8
    )
    return tmp_path / "d"


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_no_row_is_worse_than_its_largest_weight_allows() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(64, 200) * torch.logspace(-6, 3, 64)[:, None]
    matrix[3, 7] = 50 * matrix[3].abs().max()  # an outlier
    matrix[5] = 0
    codes, scale = int8.quantize(matrix)
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (64,))
    assert codes.min() >= -127
    back = int8.dequantize("m", codes, scale)
    half_step = matrix.abs().amax(1) / 127 / 2
    assert ((back - matrix).square().mean(1).sqrt() <= half_step * 1.0001).all()
    assert torch.equal(back[5], torch.zeros(200))


def test_clipping_an_outlier_reduces_the_error() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(1, 4000)
    matrix[0, 0] = 6.0
    back = int8.dequantize("m", *int8.quantize(matrix))
    step = matrix.abs().max() / 127
    plain = (matrix / step).round() * step
    assert (back - matrix).square().sum() < (plain - matrix).square().sum()
    assert back.max() < 6.0


@pytest.mark.parametrize("vocab", [1, 8, 96, 101])
def test_ids_as_bits(vocab: int) -> None:
    ids = (
        torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[: vocab // 2 + 1]
        .sort()
        .values
    )
    bits = int8.to_bits(ids, vocab)
    assert bits.shape == (-(-vocab // 8),)
    assert torch.equal(int8.from_bits(bits, vocab), ids)
    assert int8.to_bits(torch.tensor([0, 3, 8]), 9).tolist() == [0b1001, 1]


def test_round_trip(drafter: Drafter, target: Target, tmp_path: Path) -> None:
    compact.save(drafter, tmp_path / "d", target, torch.bfloat16, rows=INT8)
    assert json.loads((tmp_path / "d" / "config.json").read_text())["weights"] == "int8"
    assert checkpoint.read(tmp_path / "d").problems() == []
    back = checkpoint.load(tmp_path / "d", target)
    assert back.config == drafter.config
    assert (back.target_ids is None) == (drafter.target_ids is None)
    assert back.target_ids is None or torch.equal(back.target_ids, drafter.target_ids)
    for (name, before), after in zip(
        drafter.state_dict().items(), back.state_dict().values(), strict=True
    ):
        if before.ndim == 2:
            bound = before.abs().amax(1, keepdim=True) / 254 * before.shape[1] ** 0.5
            assert ((after - before).norm(dim=1, keepdim=True) <= bound * 1.0001).all(), name
        else:
            assert torch.equal(after, before.bfloat16().float()), name
    same, total = same_drafts(drafter, back, 6)
    assert same >= 0.8 * total
    assert checkpoint.load(tmp_path / "d", target, torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_stored_tensors(folder: Path, target: Target) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert "target_ids" not in tensors
    assert tensors[int8.BITS].numel() == target.vocab_size // 8
    assert tensors["norm.weight"].dtype == tensors["mask_hidden"].dtype == torch.float32
    matrices = {name for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    assert {name + ".scale" for name in matrices} == {
        name for name in tensors if name.endswith(".scale")
    }
    assert len(matrices) == 2 * 7 + 1


def test_trained_embeddings_are_stored_in_int8(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target, "p-eagle", 1)
    drafter.embed_tokens = drafter.embed_tokens + 0.5
    compact.save(drafter, tmp_path / "d", target, rows=INT8)
    assert (
        load_file(tmp_path / "d" / "model.safetensors")["embed_tokens.weight"].dtype == torch.int8
    )
    back = checkpoint.load(tmp_path / "d", target)
    assert torch.allclose(back.embed_tokens, drafter.embed_tokens, atol=0.01)


def test_unsorted_ids_are_stored_as_a_list(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target, "p-eagle", 1, draft_vocab=40)
    assert drafter.target_ids is not None
    drafter.target_ids = drafter.target_ids.flip(0)
    drafter.lm_head = drafter.lm_head.flip(0)
    compact.save(drafter, tmp_path / "d", target, rows=INT8)
    back = checkpoint.load(tmp_path / "d", target)
    assert back.target_ids is not None and torch.equal(back.target_ids, drafter.target_ids)


def test_folders_without_the_key_still_load(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target, "p-eagle", 2, draft_vocab=40)
    compact.save(drafter, tmp_path / "d", target)
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    assert raw["format_version"] == 1
    assert "weights" not in raw
    assert same_drafts(drafter, checkpoint.load(tmp_path / "d", target), 6) == (48, 48)


DAMAGE = {
    "no scale": (lambda t: t.pop("fc.weight.scale"), "fc.weight.scale is missing"),
    "nan": (lambda t: t["fc.weight.scale"].fill_(float("nan")), "not above 0"),
    "negative": (lambda t: t["fc.weight.scale"].neg_(), "not above 0"),
    "short": (
        lambda t: t.update({"fc.weight.scale": t["fc.weight.scale"][:-1].clone()}),
        "per row",
    ),
    "integers": (lambda t: t.update({"fc.weight.scale": t["fc.weight.scale"].int()}), "per row"),
    "no matrix": (lambda t: t.pop("fc.weight"), "fc.weight is missing"),
    "short bits": (
        lambda t: t.update({int8.BITS: t[int8.BITS][:-1].clone()}),
        "does not cover a vocabulary of 96",
    ),
    "other bits": (lambda t: t[int8.BITS].fill_(255), "target_ids has shape"),
}


@pytest.mark.parametrize(("edit", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_broken_files_are_refused(folder: Path, target: Target, edit, words: str) -> None:
    change(folder, edit)
    with pytest.raises(UserError, match=words):
        checkpoint.load(folder, target)


def test_an_unknown_storage_is_refused(folder: Path, target: Target) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"int8"', '"int3"'))
    with pytest.raises(UserError, match="as 'int3', but this peagle reads float, int8, int4"):
        checkpoint.load(folder, target)
    path.write_text(path.read_text().replace('"weights": "int3",', ""))
    with pytest.raises(UserError, match="scale is unexpected"):
        checkpoint.load(folder, target)


def test_weights_that_are_not_finite_are_not_written(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target, "p-eagle", 1)
    drafter.fc.weight.data[0, 0] = float("inf")
    with pytest.raises(UserError, match=r"fc\.weight is not finite"):
        compact.save(drafter, tmp_path / "d", target, rows=INT8)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_exports_have_dequantized_weights(folder: Path, target: Target, tmp_path: Path, to) -> None:
    drafter = checkpoint.load(folder, target)
    rounded = make_drafter(target, "p-eagle", 2, draft_vocab=40)
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = int8.dequantize("w", *int8.quantize(module.weight.data))
    for name, each in {"stored": drafter, "rounded": rounded}.items():
        export(each, tmp_path / name, to, 5, VERIFIER)
    first, second = (
        load_file(tmp_path / name / "model.safetensors") for name in ("stored", "rounded")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (
        complete_tensors(checkpoint.load(tmp_path / "stored", None)).keys()
        == complete_tensors(drafter).keys()
    )


def test_the_export_check_reads_it(folder: Path, target: Target) -> None:
    findings = check(folder, target)
    assert not [finding for finding in findings if finding.level == "error"]
    assert sum("identical" in finding.text for finding in findings) == 2


def test_a_model_card_is_allowed(folder: Path) -> None:
    for name in ("README.md", "curves.png"):
        (folder / name).touch()
    assert checkpoint_folder(folder) == folder.resolve()
