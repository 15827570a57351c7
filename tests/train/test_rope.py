"""Training for a given context: features, captures and answers use the RoPE of that context."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peagle.errors import UserError
from peagle.server.engines.engine_factory import EngineFactory
from peagle.server.settings import ServerSettings
from peagle.target import Target
from peagle.train.config import TrainConfig
from peagle.train.data.documents import read_documents
from peagle.train.features.capture import Capture
from peagle.train.features.shard_writer import CaptureSettings
from peagle.train.features.stored import StoredTarget
from peagle.train.run import load_teacher
from peagle.train.setup import apply_capture
from tests.support.command_line import run
from tests.support.engine.decoding import plain
from tests.support.models.rope_models import (
    AUX,
    BOUNDARY,
    longrope,
    rope_drafter,
    rope_target,
    save_rope_target,
)
from tests.support.train.training import make_run, some_config, train, write_answers

SETTINGS = CaptureSettings(top_k=8, aux_layer_ids=AUX, shard_bytes=200_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_rope_target("phi3", tmp_path_factory.mktemp("phi3"))


def capture_features(target: Target, out: Path, data: Path) -> Path:
    Capture(target, read_documents([data], target, 128), out, SETTINGS).run()
    return out


@pytest.mark.parametrize("context", [BOUNDARY, None])
def test_a_capture_keeps_its_context(context: int | None, tmp_path: Path) -> None:
    target = rope_target("phi3", context)
    data = write_answers(target, tmp_path / "answers.jsonl", count=4, tokens=12)
    out = capture_features(target, tmp_path / "capture", data)
    stored = StoredTarget(out, torch.float32, "cpu")
    assert (stored.context, stored.rope_context) == (target.context, target.context)
    assert rope_drafter(stored).config.rope == rope_drafter(target).config.rope
    config = TrainConfig(data=str(out), target=target.name, layers=1)
    assert apply_capture(config).context == 0
    with pytest.raises(UserError, match="leave out context, or capture again"):
        apply_capture(replace(config, context=60))
    other = rope_target("phi3", 60)
    with pytest.raises(UserError, match=f"begun with context {target.context}, now it is 60"):
        Capture(other, read_documents([data], other, 128), out, SETTINGS)


def test_a_capture_without_a_context_is_refused(tmp_path: Path) -> None:
    """Earlier versions stored no context, and features with the RoPE of each pass."""
    target = rope_target("phi3")
    data = write_answers(target, tmp_path / "answers.jsonl", count=2, tokens=9)
    out = capture_features(target, tmp_path / "capture", data)
    record = json.loads((out / "capture.json").read_text())
    del record["context"]
    (out / "capture.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="capture them again"):
        StoredTarget(out, torch.float32, "cpu")


def test_training_for_a_short_context(folder: Path, tmp_path: Path) -> None:
    """The answers are short either way; the context alone decides."""
    data = write_answers(rope_target("phi3", 40), tmp_path / "answers.jsonl", count=12, tokens=12)
    for context, chosen in ((40, "short"), (0, "long")):
        config = some_config(
            data,
            tmp_path / chosen,
            target=str(folder),
            aux_layer_ids=AUX,
            context=context,
            steps=1,
            dtype="float32",
        )
        teacher = load_teacher(config, "cpu")
        assert teacher.context == (context or 128)
        trainer = make_run(teacher, config)
        train(trainer)
        written = json.loads((tmp_path / chosen / "drafter" / "config.json").read_text())
        assert written["rope"]["short_factor"] == longrope()[f"{chosen}_factor"]


def test_commands_take_a_context(folder: Path, tmp_path: Path) -> None:
    options = ("--context", 40, "--device", "cpu", "--dtype", "float32", "--json")
    words = "w7 w30 w12 w44"
    answer = json.loads(
        run("generate", folder, words, "--raw", "--method", "none", "--max-tokens", 20, *options)
    )
    target = rope_target("phi3", 40)
    target.tap(())
    assert answer["token_ids"] == plain(target, [7, 30, 12, 44], 20)
    data = write_answers(target, tmp_path / "answers.jsonl", count=2, tokens=9)
    out = tmp_path / "capture"
    run(
        "capture", "--data", data, "--out", out, "--target", folder, "--aux-layers", "0,1", *options
    )
    assert json.loads((out / "capture.json").read_text())["context"] == 40


def test_the_server_loads_for_its_context(folder: Path) -> None:
    """Extra engines have the context of the server, too."""
    settings = ServerSettings(
        pair=str(folder), device="cpu", dtype="float32", method="none", context=40, max_batch=2
    )
    factory = EngineFactory(settings)
    factory.load()
    engines = [factory.build_main(), factory.build_extra(factory.key)]
    assert [engine.context for engine in engines] == [40, 40]
    with pytest.raises(UserError, match="context"):
        engines[0].check_prompt([7] * 41)
