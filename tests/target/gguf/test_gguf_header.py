"""Invalid and damaged GGUF files: errors that name the file and the fix."""

import random
import struct
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from typer.testing import CliRunner

from peagle.cli import app
from peagle.errors import UserError
from peagle.target import load_target
from peagle.target.gguf.header import read_header
from tests.support.models.gguf_files import TinyGGUF


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return TinyGGUF(tmp_path / "model.gguf", "llama", "Q4_K", {"attn_v": "Q6_K"}).write()


def test_the_header_equals_that_of_the_gguf_package(file: Path) -> None:
    header = read_header(file)
    reader = GGUFReader(file)
    assert [*header.tensors] == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.format == tensor.tensor_type.name
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert info.start == tensor.data_offset and info.size == tensor.n_bytes
        content = torch.from_numpy(tensor.data.copy()).view(torch.uint8)
        assert torch.equal(header.bytes_of(info).flatten(), content.flatten())
    assert header.architecture == "llama"
    assert header.metadata["llama.block_count"] == 4


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    for content in (b"", b"GG", b"hello, this is no model"):
        path.write_bytes(content)
        with pytest.raises(UserError) as error:
            read_header(path)
        assert str(error.value) == f"{path} is not a GGUF file: give a .gguf file, or a folder"
    result = CliRunner().invoke(app, ["generate", str(path), "hi", "--method", "none"])
    assert result.exit_code == 2 and "is not a GGUF file" in result.output.replace("\n", " ")


def header_error(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_header(path)
    return str(error.value)


def test_an_old_version_and_parts(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:4] + struct.pack("<I", 1) + content[8:])
    assert header_error(file) == (
        f"{file} has GGUF version 1, and only 2 and 3 are supported (little-endian): convert it"
        " again with a current llama.cpp"
    )
    writer = TinyGGUF(file)
    writer.entries["split.count"] = 3
    assert header_error(writer.write()) == (
        f"{file} is one of 3 parts of a model: merge them with `llama-gguf-split --merge`, and"
        " give the merged file"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("general.alignment", 0), ("general.alignment", "32"), ("split.count", "3")],
)
def test_metadata_with_invalid_numbers(tmp_path: Path, key: str, value: int | str) -> None:
    writer = TinyGGUF(tmp_path / "model.gguf")
    writer.entries[key] = value
    assert header_error(writer.write()) == (
        f"{writer.path} is damaged or truncated ({key} is {value!r}): copy or download it again"
    )


def test_truncated_files(file: Path) -> None:
    content = file.read_bytes()
    for length in (5, 30, 300, 2000, len(content) - 40000, len(content) - 100):
        file.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"truncated.*copy or download it again"):
            read_header(file)
    result = CliRunner().invoke(app, ["generate", str(file), "hi", "--method", "none"])
    assert result.exit_code == 2 and "truncated" in result.output


def test_damaged_headers_raise_only_user_errors(file: Path) -> None:
    """No other exception is raised, and wrong lengths cost neither endless work nor memory."""
    content = bytearray(file.read_bytes())
    end = min(info.start for info in read_header(file).tensors.values())
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(4, end)] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            read_header(file)
        except UserError:
            refused += 1
    assert refused > 100


def test_a_missing_tensor(tmp_path: Path) -> None:
    for name in ("blk.2.ffn_up.weight", "blk.1.attn_norm.weight", "token_embd.weight"):
        writer = TinyGGUF(tmp_path / "model.gguf")
        writer.left_out = (name,)
        with pytest.raises(UserError, match=r"lacks \d tensors? of a llama model"):
            load_target(writer.write(), torch.float32, "cpu", stored=True)


def test_a_missing_bias(tmp_path: Path) -> None:
    writer = TinyGGUF(tmp_path / "model.gguf", "qwen2")
    writer.left_out = ("blk.2.attn_k.bias",)
    with pytest.raises(UserError, match=r"the first is model.layers.2.self_attn.k_proj.bias"):
        load_target(writer.write(), torch.float32, "cpu", stored=True)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    file = TinyGGUF(tmp_path / "model.gguf", "gptneox").write()
    with pytest.raises(UserError, match="gptneox"):
        load_target(file, torch.float32, "cpu", stored=True)
    for command in (["generate", str(file), "hi", "--method", "none"], ["doctor", str(file)]):
        result = CliRunner().invoke(app, command)
        output = " ".join(result.output.split())
        assert result.exit_code == 2 and "(architecture 'gptneox')" in output, output
