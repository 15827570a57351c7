"""Training on captured features equals training with the target in the same process."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from peagle import model_pair
from peagle.cli import app
from peagle.core import Sampling
from peagle.drafter.config import config_for
from peagle.drafter.formats import checkpoint
from peagle.errors import UserError
from peagle.reference.decode import decode
from peagle.reference.proposer import proposer_for
from peagle.target import Target
from peagle.train import run
from peagle.train.config import TrainConfig
from peagle.train.data.chains import NO_CHAINS
from peagle.train.data.documents import (
    Document,
    Documents,
    join_documents,
    pack_documents,
    read_documents,
    split_held_out,
)
from peagle.train.data.pack import build_batch
from peagle.train.features.capture import Capture
from peagle.train.features.features import FeatureExtractor
from peagle.train.features.shard_writer import CaptureSettings, top_k_log_probs
from peagle.train.features.shards import Shards, read_shard
from peagle.train.features.stored import StoredFeatures, StoredTarget
from peagle.train.features.teacher import TopKLogits
from peagle.train.objective.chunk_loss import hidden_state_loss, top_k_loss
from peagle.train.objective.loss import Loss
from peagle.train.setup import apply_capture
from tests.support.models.tiny_models import AUX, CONFIGS, make_target
from tests.support.train.training import some_config, write_answers

pytestmark = pytest.mark.usefixtures("no_curves")
PRECISE = CaptureSettings(top_k=96, aux_layer_ids=AUX, precise=True, shard_bytes=400_000)
SMALL = CaptureSettings(top_k=8, aux_layer_ids=AUX, shard_bytes=200_000)


@pytest.fixture(scope="module")
def data(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answers(target, tmp_path_factory.mktemp("data") / "answers.jsonl")


@pytest.fixture(scope="module")
def documents(target: Target, data: Path) -> Documents:
    return read_documents([data], target, 256)


@pytest.fixture(scope="module")
def precise(target: Target, documents: Documents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(target, documents, tmp_path_factory.mktemp("precise"), PRECISE)


@pytest.fixture(scope="module")
def small(target: Target, documents: Documents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(target, documents, tmp_path_factory.mktemp("small"), SMALL)


def capture(target: Target, documents: Documents, folder: Path, settings: CaptureSettings) -> Path:
    Capture(target, documents, folder, settings).run()
    return folder


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("settings", [SMALL, PRECISE])
def test_the_size_is_known_before_the_capture(
    target: Target, documents: Documents, tmp_path: Path, settings: CaptureSettings
) -> None:
    job = Capture(target, documents, tmp_path, settings)
    reported = job.size
    job.run()
    assert reported == pytest.approx(size_of(tmp_path), rel=0.02)
    assert len(job.parts) > 1
    again = Capture(target, documents, tmp_path, settings)
    assert again.size == 0 and not again.missing


def test_a_full_disk_is_refused(
    target: Target, documents: Documents, tmp_path: Path, monkeypatch
) -> None:
    job = Capture(target, documents, tmp_path / "out", SMALL)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, int(job.size * 1.04)))
    with pytest.raises(UserError, match="are free there"):
        job.run()
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, int(job.size * 1.06)))
    job.run()


class Interrupted(Exception):
    pass


def test_an_interrupted_capture_loses_one_shard(
    target: Target, documents: Documents, small: Path, tmp_path: Path
) -> None:
    job = Capture(target, documents, tmp_path, SMALL)
    first = sum(len(documents[i][0]) for i in job.parts[0])

    def interrupt(done: int, total: int, tokens: int) -> None:
        if done > first:
            raise Interrupted

    with pytest.raises(Interrupted):
        job.run(interrupt)
    (tmp_path / ".shard-00001.safetensors.1").write_bytes(b"torn")
    assert [file.name for file in tmp_path.glob("shard-*")] == ["shard-00000.safetensors"]
    with pytest.raises(UserError, match="lacks"):
        Shards(tmp_path)
    capture(target, documents, tmp_path, SMALL)
    assert same_files(tmp_path, small)


def test_a_lost_shard_is_written_again(
    target: Target, documents: Documents, small: Path, tmp_path: Path
) -> None:
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    last = max(tmp_path.glob("shard-*"))
    kept = min(tmp_path.glob("shard-*")).stat().st_mtime_ns
    last.unlink()
    capture(target, documents, tmp_path, SMALL)
    assert same_files(tmp_path, small)
    assert min(tmp_path.glob("shard-*")).stat().st_mtime_ns == kept


def same_files(a: Path, b: Path) -> bool:
    names = sorted(file.name for file in b.iterdir() if file.name != ".lock")
    assert sorted(file.name for file in a.iterdir() if file.name != ".lock") == names
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def test_other_settings_are_refused(
    target: Target, documents: Documents, small: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"top_k 8, now it is 9"):
        Capture(target, documents, small, CaptureSettings(9, AUX, shard_bytes=SMALL.shard_bytes))
    with pytest.raises(UserError, match=r"aux_layer_ids \[1, 3, 6\], now it is \[1, 3, 5\]"):
        Capture(
            target, documents, small, CaptureSettings(8, (1, 3, 5), shard_bytes=SMALL.shard_bytes)
        )
    with pytest.raises(UserError, match=r"documents 60, now it is 59"):
        Capture(target, documents.subset(np.arange(59)), small, SMALL)
    with pytest.raises(UserError, match="use 1 to 96"):
        Capture(target, documents, small, CaptureSettings(97, AUX))
    (tmp_path / "answers.jsonl").touch()
    with pytest.raises(UserError, match="no part of a capture"):
        Capture(target, documents, tmp_path, SMALL)


def test_contents_of_a_shard(target: Target, documents: Documents, small: Path) -> None:
    shards = Shards(small)
    read = shards.documents(256)
    assert read.keys == documents.keys
    for name in ("ids", "answer_mask", "starts", "indices"):
        assert np.array_equal(getattr(read, name), getattr(documents, name))
    number = len(documents) - 2
    ids = torch.from_numpy(documents[number][0]).long()
    g, logits, tokens = shards.rows(number, len(ids))
    target.tap(AUX)
    out = target.forward(ids)
    assert (
        g.dtype == torch.bfloat16 and logits.dtype == torch.float16 and tokens.dtype == torch.int32
    )
    assert torch.allclose(g.float(), out.hidden, rtol=0.01, atol=0.01)
    best = out.logits.log_softmax(-1).topk(8)
    assert torch.equal(tokens.long(), best.indices)
    assert torch.allclose(logits.float(), best.values, atol=0.01)
    cut = shards.documents(20)
    assert len(cut.ids) == sum(min(20, n) for n in np.diff(documents.starts))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_stored_target_replaces_every_target(name: str, tied: bool, tmp_path: Path) -> None:
    target = make_target(name, tie_word_embeddings=tied)
    rng = np.random.default_rng(0)
    record = {"key": "a@0", "ids": rng.integers(6, 96, 9).tolist(), "spans": [[3, 9]]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    documents = read_documents([tmp_path / "a.jsonl"], target, 99)
    folder = capture(target, documents, tmp_path / "out", SMALL)
    stored = StoredTarget(folder, torch.float32, "cpu")
    assert config_for(stored, "p-eagle", 2, AUX, 5) == config_for(target, "p-eagle", 2, AUX, 5)
    assert torch.equal(stored.embedding, target.embedding) and torch.equal(
        stored.lm_head, target.lm_head
    )
    assert ("lm_head.weight" in read_shard(folder / "head.safetensors").tensors) != tied
    for name in ("stop_ids", "context", "vocab_size", "hidden_size", "name", "dtype"):
        assert getattr(stored, name) == getattr(target, name)
    assert len(stored.layers) == len(target.layers)
    with pytest.raises(UserError, match="not the target"):
        stored.features(torch.zeros(1, 4))


def test_the_last_blocks_keep_their_order(tmp_path: Path) -> None:
    target = make_target(num_hidden_layers=12)
    documents = join_documents([Document(np.arange(6, 20), np.arange(14) > 3, "a@0")])
    stored = StoredTarget(capture(target, documents, tmp_path, SMALL), torch.float32, "cpu")
    for mine, theirs in zip(stored.layers[-4:], target.layers[-4:], strict=True):
        own = dict(mine.named_parameters())
        assert all(torch.equal(own[name], weight) for name, weight in theirs.named_parameters())
    assert sum(p.numel() for p in stored.model.parameters()) == 2 * 96 * 32


def train(config: TrainConfig, target: Target, monkeypatch, online: bool) -> list[dict]:
    """Train and return the log. Training from a capture must not load a target."""
    if online:
        monkeypatch.setattr(run, "load_teacher", lambda config, device: target)
    else:
        monkeypatch.setattr(model_pair, "load_target", refuse)
        monkeypatch.setattr(run, "load", refuse)
    job = run.TrainRun(config)
    assert job.plan().gigabytes > 0
    assert job.train(lambda *_: None, lambda line: None)
    monkeypatch.undo()
    return [json.loads(line) for line in (Path(config.out) / "log.jsonl").read_text().splitlines()]


def refuse(*args: object, **more: object) -> None:
    raise AssertionError("a capture needs no target")


CASES = {
    "p-eagle kl, pruned": {"draft_vocab": 40},
    "p-eagle mix, as the target": {
        "loss": "mix",
        "init": "target",
        "layers": 2,
        "train_embeddings": True,
    },
    "p-eagle ce, segments": {"loss": "ce", "segments": 2, "draft_vocab": 40},
    "eagle3": {"method": "eagle3", "depth_weight": 0.8},
}


@pytest.mark.parametrize("case", list(CASES))
def test_training_equals_online(
    target: Target, data: Path, precise: Path, tmp_path: Path, monkeypatch, case
) -> None:
    """Every step has the same losses, matches and acceptance length; the drafters are equal."""
    changes = {"steps": 6, "eval_every": 3, "save_every": 50, **CASES[case]}
    mine = some_config(data, tmp_path / "online", **changes)
    theirs = some_config(
        precise, tmp_path / "stored", **(changes | {"target": "tiny llama", "aux_layer_ids": ()})
    )
    online = train(mine, target, monkeypatch, True)
    stored = train(theirs, target, monkeypatch, False)
    assert [list(entry) for entry in stored] == [list(entry) for entry in online]
    for a, b in zip(stored, online, strict=True):
        for key in (
            "loss",
            "loss_per_depth",
            "match",
            "norm",
            "acceptance_length",
            "accepted",
            "rows",
        ):
            # Lists are rounded to 1e-4, so close values may be that far apart.
            assert a.get(key) == pytest.approx(b.get(key), abs=2e-4)
    a, b = (checkpoint.load(tmp_path / name / "drafter", target) for name in ("stored", "online"))
    assert a.config == b.config
    for name, tensor in a.state_dict().items():
        assert torch.allclose(tensor.float(), b.state_dict()[name].float(), atol=2e-3), name


def test_a_small_top_k_trains(target: Target, small: Path, tmp_path: Path, monkeypatch) -> None:
    config = some_config(
        small, tmp_path / "run", target="tiny llama", steps=40, draft_vocab=60, log_every=5
    )
    log = train(config, target, monkeypatch, False)
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    drafter = checkpoint.load(tmp_path / "run" / "drafter", target, target.dtype)
    assert drafter.config.trained and drafter.config.target == "tiny llama"
    target.tap(drafter.config.aux_layer_ids)
    prompt = [7, 30, 11, 50]
    steps = list(decode(target, proposer_for(drafter), prompt, 4, 30, Sampling()))
    plain = [t for step in decode(target, None, prompt, 0, 30, Sampling()) for t in step.tokens]
    assert [t for step in steps for t in step.tokens] == plain
    assert sum(step.accepted for step in steps) > 0


def test_training_resumes(target: Target, small: Path, tmp_path: Path, monkeypatch) -> None:
    config = some_config(small, tmp_path / "whole", target="tiny llama", steps=8, save_every=4)
    whole = train(config, target, monkeypatch, False)
    config = some_config(small, tmp_path / "parts", target="tiny llama", steps=8, save_every=4)
    assert not run.TrainRun(config).train(lambda *_: None, lambda line: None, stop_after=0.0)
    parts = train(config, target, monkeypatch, False)
    assert [e.get("loss") for e in parts] == pytest.approx([e.get("loss") for e in whole], abs=1e-6)


def test_settings_that_do_not_fit_a_capture(small: Path, data: Path, tmp_path: Path) -> None:
    wrong = {
        "trained from alone": {"data": f"{small},{data}"},
        r"holds those of \(1, 3, 6\)": {"aux_layer_ids": (2, 4, 5)},
        "captured from tiny llama": {"target": "another"},
        "last 4 blocks": {"init": "target", "layers": 5},
    }
    for message, changes in wrong.items():
        with pytest.raises(UserError, match=message):
            apply_capture(replace(some_config(small, tmp_path, target="tiny llama"), **changes))
    assert apply_capture(some_config(small, tmp_path, target="smollm2-135m")).target == "tiny llama"
    online = some_config(data, tmp_path)
    assert apply_capture(online) is online


@pytest.mark.parametrize("mix", [1.0, 0.0, 0.3])
def test_topk_loss_equals_the_full_loss(target: Target, mix: float) -> None:
    """The loss equals that of hidden states if all tokens are known, and is zero if none is."""
    torch.manual_seed(0)
    normed, last, weight = torch.randn(7, 32), torch.randn(7, 32), torch.rand(7)
    own = torch.arange(0, 96, 2)
    to_draft = torch.full((96,), -1)
    to_draft[own] = torch.arange(48)
    logits, tokens = top_k_log_probs(last, target.lm_head, 96, 5.0, torch.float32)
    got = top_k_loss(normed, TopKLogits(logits, to_draft[tokens]), weight, target.lm_head[own], mix)
    expected = hidden_state_loss(normed, last, weight, target.lm_head[own], mix, 5.0)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=1e-4)
    nothing = TopKLogits(logits, -torch.ones_like(tokens))
    loss, _, match, _, gradient = top_k_loss(normed, nothing, weight, target.lm_head[own], mix)
    assert not loss.any() and not match.any() and not gradient.any()


def test_topk_gradient_equals_autograd(target: Target) -> None:
    torch.manual_seed(0)
    normed, last = torch.randn(5, 32, requires_grad=True), torch.randn(5, 32)
    logits, tokens = top_k_log_probs(last, target.lm_head, 6, 0.0, torch.float32)
    loss, *_, gradient = top_k_loss(
        normed, TopKLogits(logits, tokens), torch.ones(5), target.lm_head, 0.4
    )
    loss.sum().backward()
    assert torch.allclose(normed.grad, gradient, atol=1e-5)
    compiled = Loss(target.lm_head, 3, "mix", 0.4, 1.0, 0.0)
    compiled.chunk_loss = torch.compile(compiled.chunk_loss, backend="eager", fullgraph=True)
    depth = torch.zeros(5, dtype=torch.int32)
    out = compiled(normed.detach(), TopKLogits(logits, tokens), depth, 1.0)
    assert torch.allclose(out.gradient, gradient, atol=1e-5)


def test_held_out_documents_keep_their_indices(
    target: Target, documents: Documents, small: Path
) -> None:
    _, held_out = split_held_out(documents, 6, 0)
    assert [documents.keys[i] for i in held_out.indices] == list(held_out.keys)
    batch = build_batch(pack_documents(held_out, np.array([3, 1]), 128), NO_CHAINS)
    stored = StoredFeatures(StoredTarget(small, torch.float32, "cpu"), None)
    g, teacher = stored(batch)
    expected, last = FeatureExtractor(target, AUX)(batch)
    total = sum(batch.lengths)
    assert g.dtype == torch.float32 and len(g) == len(expected)
    assert torch.allclose(g[:total], expected[:total], rtol=0.01, atol=0.01)
    assert torch.equal(teacher.ids[:total, 0], (last @ target.lm_head.T)[:total].argmax(-1).int())


def test_the_command(target: Target, data: Path, tmp_path: Path, monkeypatch) -> None:
    target.model.save_pretrained(tmp_path / "target")
    words = [
        "capture",
        "--target",
        str(tmp_path / "target"),
        "--data",
        str(data),
        "--out",
        str(tmp_path / "out"),
    ]
    words += ["--aux-layers", "1,3,6", "--top-k", "8", "--dtype", "float32", "--device", "cpu"]
    reported = json.loads(
        CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout
    )
    assert (
        reported["documents"] == 60 and reported["gigabytes"] > 0 and reported["kept_shards"] == 0
    )
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0 and "1 of 1 shards are there already" in again.stderr
    other = CliRunner().invoke(app, [*words, "--top-k", "9"])
    assert other.exit_code == 2 and "top_k 8, now it is 9" in other.stderr
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1000))
    full = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "other")])
    assert full.exit_code == 2 and "0.00 are free there" in full.stderr
