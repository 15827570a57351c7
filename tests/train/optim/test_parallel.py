"""Two processes train as one does: DDP and FSDP over gloo, steps in which only one process has a
pack, and states that either can resume.

The processes run this file as a script, with the variables torchrun would set.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from peagle.train.optim.parallel import World, join_processes
from peagle.train.state import list_states
from peagle.train.trainer import Trainer
from tests.support.models.tiny_models import make_target
from tests.support.train.training import EXTENSIONS, make_run, some_config, train, write_answers

KINDS = ("ddp", "fsdp")
METHODS = ("p-eagle", "eagle3")
# 16 documents of 24 tokens, 5 in a pack: an epoch has 4 packs, so every second step has one pack.
SETTINGS = {
    "pack_tokens": 128,
    "k": 3,
    "steps": 5,
    "packs_per_step": 3,
    "held_out": 0,
    "save_every": 3,
    "layers": 2,
}


def run(folder: Path, kind: str, method: str, world: World = World(), **more: float) -> Trainer:  # noqa: B008
    """Train in folder/`kind method`, from its newest state if there is one."""
    extensions = EXTENSIONS["all"] if method == "p-eagle" else {"train_embeddings": True}
    settings = SETTINGS | {"parallel": kind, "method": method} | extensions
    config = some_config(folder / "answers.jsonl", folder / f"{kind} {method}", **settings)
    trainer = make_run(make_target(), config, world)
    trainer.resume()
    train(trainer, **more)
    return trainer


def train_in_process(folder: Path) -> None:
    """Stop each run after its first step, by the clock of one process, and resume it."""
    torch.set_num_threads(1)
    world, _ = join_processes("cpu")
    assert world.size == 2
    for method in METHODS:
        for kind in KINDS:
            assert (
                run(folder, kind, method, world, stop_after=0 if world.is_main else 1e9).step == 1
            )
            assert run(folder, kind, method, world).step == 5


def state_of(folder: Path, step: int = 5) -> dict:
    return torch.load(folder / "state" / f"step-{step:08d}.pt", weights_only=True)


def losses(folder: Path) -> list[float]:
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free port, on which processes that set SO_REUSEADDR can listen."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 0))
        yield sock.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The runs of two processes, `ddp p-eagle`, ..., and of one process, `alone/...`."""
    folder = tmp_path_factory.mktemp("parallel")
    write_answers(make_target(), folder / "answers.jsonl", count=16, tokens=20)
    with reserved_port() as port:
        train_everything(folder, port)
    return folder


def train_everything(folder: Path, port: int) -> None:
    env = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.train.optim.test_parallel", str(folder)]
    root = Path(__file__).parents[3]
    process = subprocess.Popen(command, env=env, cwd=root, stderr=subprocess.PIPE, text=True)
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(folder / "answers.jsonl", alone)
    for method in METHODS:
        run(alone, "ddp", method)
    try:
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]


def assert_close(mine: dict, theirs: dict) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            mine[name], tensor, rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(folder: Path, kind: str, method: str):
    both, alone = folder / f"{kind} {method}", folder / "alone" / f"ddp {method}"
    assert losses(both) == pytest.approx(losses(alone), rel=1e-5) and len(losses(both)) == 5
    assert_close(state_of(both)["model"], state_of(alone)["model"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_resumes_a_run_of_two(folder: Path, kind: str, method: str, tmp_path):
    """A state has full weights and optimizer moments for any number of processes."""
    both = folder / f"{kind} {method}"
    shutil.copy(folder / "answers.jsonl", tmp_path)
    shutil.copytree(both, tmp_path / both.name)
    list_states(tmp_path / both.name / "state")[-1].unlink()
    trainer = run(tmp_path, kind, method)
    assert trainer.step == 5 and len(losses(trainer.out)) == 5
    assert losses(trainer.out) == pytest.approx(losses(both), rel=1e-5)
    assert_close(state_of(trainer.out)["model"], state_of(both)["model"])


def test_some_steps_leave_a_process_without_a_pack(folder: Path):
    """The steps above include two packs and one, and one pack and none."""
    config = some_config(folder / "answers.jsonl", folder / "nothing", **SETTINGS)
    counts = []
    for rank in range(2):
        dataset = make_run(make_target(), config).dataset
        dataset.world = World(rank, 2)
        counts.append([len(batches) for batches in dataset.load(0, 5)])
    assert counts == [[2, 1, 2, 1, 2], [1, 0, 1, 0, 1]]


def test_one_process_needs_no_group():
    world, device = join_processes("cpu")
    assert world == World() and world.is_main and device == "cpu"
    assert world.sum_number(3.0, torch.device("cpu")) == 3.0


def train_in_two_processes(folder: Path) -> None:
    """Fork the second process, which saves its imports, and exit with its status."""
    child = os.fork()
    rank = "0" if child else "1"
    os.environ.update(RANK=rank, LOCAL_RANK=rank)
    train_in_process(folder)
    if child:
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    train_in_two_processes(Path(sys.argv[1]))
