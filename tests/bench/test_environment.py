"""A result identifies the weights that ran: stored in a GGUF file, or dequantized."""

from pathlib import Path

import pytest
import torch

from peagle.bench.environment import describe_target
from peagle.target import load_target
from tests.support.models.gguf_files import TinyGGUF


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))


def test_stored_weights_differ_from_widened_ones(tmp_path: Path) -> None:
    file = TinyGGUF(tmp_path / "m.gguf", "llama", "Q4_1").write()
    stored, widened = (
        describe_target(load_target(file, torch.float32, "cpu", stored=stored))
        for stored in (True, False)
    )
    assert stored["name"] == widened["name"] == "m.gguf"
    assert (stored["weights"], widened["weights"]) == ("Q4_1", "float32")
    assert stored["dtype"] == widened["dtype"] and stored["sha"] == widened["sha"]


def test_the_digest_covers_header_and_data(tmp_path: Path) -> None:
    digests = set()
    for name, format in (("a", "Q4_1"), ("b", "Q8_0"), ("c", "Q4_1")):
        file = TinyGGUF(tmp_path / f"{name}.gguf", "llama", format).write()
        if name == "c":  # changes a weight
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        digests.add(describe_target(load_target(file, torch.float32, "cpu", stored=True))["sha"])
    assert None not in digests and len(digests) == 3
