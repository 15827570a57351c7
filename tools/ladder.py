"""The ladder: drafters trained and measured one after the other, on one target and one store of its features.

    python -m tools.ladder --data answers/ --bench bench/ --out OUT --steps 1200
    python -m tools.ladder ... --only combined --set loss=tvmix --set mix=0.95    # settings that are chosen late

Each run leaves OUT/NAME-SEED (the drafter, int8) and OUT/NAME-SEED.json (its record); a run that has a record is done.
The acceptance lengths are those of walking along the target's own greedy answers (train/acceptance.py).
"""

import argparse
import gc
import pickle
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from peagle.core import Step
from peagle.data.bench import read_sets
from peagle.draft_shape import DraftShape
from peagle.drafter.formats import checkpoint, compact
from peagle.errors import UserError
from peagle.evaluate.evaluate import summarize
from peagle.model_pair import choose_device
from peagle.paths import write_bytes, write_json
from peagle.train.config import TrainConfig, read_config
from peagle.train.data.documents import Documents, join
from peagle.train.evaluation.acceptance import acceptance, tree_acceptance
from peagle.train.evaluation.benchmark_answers import answer_tasks
from peagle.train.features.features import online
from peagle.train.objective.passes import Passes
from peagle.train.publish import device_name
from peagle.train.run import TrainRun, load_teacher

FILE = Path(__file__).resolve().parents[1] / "docs" / "results" / "comparison" / "ladder.toml"
KS = (3, 5, 7, 11)
TREES = (DraftShape(7, 15), DraftShape(7, 31), DraftShape(11, 31))
NEVER = 1 << 30  # steps

Answers = dict[tuple[str, float], Documents]  # by set and temperature


@dataclass(frozen=True, slots=True)
class Rung:
    name: str
    label: str
    settings: dict[str, Any]  # that differ from the base
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Ladder:
    base: dict[str, Any]
    rungs: tuple[Rung, ...]

    def config(self, rung: Rung, out: Path, scratch: Path) -> TrainConfig:
        settings = self.base | rung.settings | {"seed": rung.seed, "out": str(scratch)}
        if str(settings.get("init", "")).startswith("OUT/"):
            settings["init"] = str(out / str(settings["init"]).removeprefix("OUT/"))
        return read_config(None, settings)

    @property
    def taps(self) -> tuple[int, ...]:
        """Of all runs together: one store of features serves them."""
        told = [
            one.get("aux_layer_ids", ())
            for one in (self.base, *(rung.settings for rung in self.rungs))
        ]
        every = [read_config(None, {"aux_layer_ids": taps}).aux_layer_ids for taps in told]
        return tuple(sorted({tap for taps in every for tap in taps}))


def read_ladder(
    path: Path, base: dict[str, Any], chosen: dict[str, Any], only: list[str]
) -> Ladder:
    """`base` goes over the file's own; `chosen` are the settings of runs that wait for them."""
    told = tomllib.loads(path.read_text(encoding="utf-8"))
    rungs = []
    for run in told["run"]:
        late = run.get("chosen", False)
        if (not only or run["name"] in only) and (chosen or not late):
            settings = run.get("set", {}) | (chosen if late else {})
            rungs += [
                Rung(run["name"], run["label"], settings, seed) for seed in run.get("seeds", [0])
            ]
    if unknown := set(only) - {run["name"] for run in told["run"]}:
        raise UserError(f"{path} has no run {', '.join(sorted(unknown))}: correct --only")
    if not rungs:
        raise UserError(
            f"nothing to run in {path}: correct --only, or give --set for a run that waits for it"
        )
    return Ladder(told["base"] | base, tuple(sorted(rungs, key=lambda rung: rung.seed)))


def read_answers(file: Path | None, config: TrainConfig, options: argparse.Namespace) -> Answers:
    """From the file, or made, and kept there; by a target of their own, for one that is tapped cannot answer."""
    sets = [word.strip() for word in options.sets.split(",")]
    if file is not None and file.is_file():
        known: Answers = pickle.loads(file.read_bytes())
        if missing := [name for name in sets if (name, 0.0) not in known]:
            raise UserError(
                f"{file} has no greedy answers to {missing[0]}: remove it, or name other --sets"
            )
        return {(name, 0.0): some(known[name, 0.0], options.limit) for name in sets}
    tasks = read_sets(sets, options.bench, options.limit)
    target = load_teacher(config, choose_device(config.device))
    made = {(name, 0.0): answer_tasks(target, tasks[name], options.max_tokens)[0] for name in tasks}
    if file is not None:
        write_bytes(file, pickle.dumps(made))
    return made


def some(documents: Documents, limit: int | None) -> Documents:
    """Those of so many tasks, evenly chosen: answers lie in the order they ended, short ones first."""
    tasks = [key.split("#")[0] for key in documents.keys]
    names = sorted(set(tasks))
    count = min(limit or len(names), len(names))
    picked = {names[i * len(names) // count] for i in range(count)}
    return join(
        [(*documents[i], documents.keys[i]) for i, task in enumerate(tasks) if task in picked]
    )


def train(
    rung: Rung, ladder: Ladder, store: TrainRun, answers: Answers, out: Path
) -> dict[str, Any]:
    """The record of a run; its drafter lies in OUT then."""
    with tempfile.TemporaryDirectory(dir=out, prefix=f".{rung}.") as scratch:
        run = TrainRun(ladder.config(rung, out, Path(scratch)), like=store)
        paces: list[float] = []
        if not run.train(
            lambda _, __, told: paces.append(told["seconds_per_step"]), lambda _: None
        ):
            raise KeyboardInterrupt
        trainer, target = run.trainer, run.target
        whole = checkpoint.load(trainer.out / "drafter", target, torch.float32)
        compact.save(whole, out / str(rung), target, torch.bfloat16, int8=True)
    return {
        "name": rung.name,
        "seed": rung.seed,
        "label": rung.label,
        "target": target.name,
        "method": run.config.method,
        "settings": {
            key: told if key == "init" else getattr(run.config, key)
            for key, told in rung.settings.items()
        },
        "steps": trainer.step,
        "target_tokens": trainer.tokens,
        "seconds": round(trainer.seconds, 2),
        "seconds_compiled": round(
            median(paces) * trainer.step, 2
        ),  # as if compiled before the first step
        "device": device_name(target.device),
        "bytes": sum(file.stat().st_size for file in (out / str(rung)).iterdir()),
        "sets": measured(run, out / str(rung), answers),
    }


def measured(run: TrainRun, folder: Path, answers: Answers) -> dict[str, Any]:
    """By set and form: the drafter that lies in the folder. Not compiled: that takes longer than the passes."""
    trainer, found = run.trainer, {}
    passes = Passes(checkpoint.load(folder, run.target, torch.float32), trainer.passes.dtype)
    trees = TREES if run.config.method == "p-eagle" else ()
    for (name, _), documents in answers.items():
        how = passes, online(trainer.features), documents
        chains = acceptance(*how, KS, run.config.pack_tokens, trainer.flex)
        branched = tree_acceptance(*how, trees, run.config.pack_tokens, trainer.flex)
        results = {DraftShape(k, k): chains[k] for k in KS} | branched
        found[name] = {"answers": len(documents)} | {
            str(tree): told(steps, tree.k) for tree, steps in results.items()
        }
    return found


def told(steps: list[Step], k: int) -> dict[str, Any]:
    one = summarize(steps, k)
    return {
        "acceptance_length": round(one.acceptance_length, 4),
        "accepted_per_position": [round(share, 4) for share in one.accepted_per_position],
    }


def climb(ladder: Ladder, options: argparse.Namespace) -> int:
    """Every run that has no record yet, as long as time lasts; how many failed."""
    begin, longest, failed, out = time.perf_counter(), 0.0, 0, options.out
    left = [rung for rung in ladder.rungs if not (out / f"{rung}.json").is_file()]
    if not left:
        print("every run has its record")
        return 0
    config = read_config(
        None, ladder.base | {"aux_layer_ids": ladder.taps, "out": str(out / ".store")}
    )
    answers, store = read_answers(options.answers, config, options), TrainRun(config)
    for rung in left:
        started = time.perf_counter()
        if options.seconds and started - begin + longest > options.seconds:
            print(f"{rung}: no time left")
            break
        try:
            record = train(rung, ladder, store, answers, out)
            write_json(out / f"{rung}.json", record)
            spent = time.perf_counter() - started
            longest = max(longest, spent)
            print(line(rung, record, spent), flush=True)
        except Exception as error:  # the next one may do better
            failed += 1
            traceback.print_exc()
            print(f"{rung}: failed: {type(error).__name__}: {error}", flush=True)
        gc.collect()
        torch._dynamo.reset_code_state()  # compiled passes stay; the next run's begin with shapes of their own
        if store.target.device.type == "cuda":
            torch.cuda.empty_cache()
    return failed


def line(rung: Rung, record: dict[str, Any], spent: float) -> str:
    lengths = {name: one["K=7"]["acceptance_length"] for name, one in record["sets"].items()}
    told = " ".join(f"{name} {length:.2f}" for name, length in lengths.items())
    mean = sum(lengths.values()) / len(lengths)
    return f"{rung}: K=7 mean {mean:.3f} ({told}); {record['seconds']:.0f} s of training, {spent:.0f} s in all"


def pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{word!r} is no setting: write KEY=VALUE")
        yield key, value


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ladder", type=Path, nargs="?", default=FILE)
    parser.add_argument("--data", required=True, help="folders of `peagle regenerate`, with commas")
    parser.add_argument("--bench", type=Path, help="the folder with NAME.jsonl of the sets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of every run")
    parser.add_argument("--sets", default="humaneval,mt_bench,gsm8k")
    parser.add_argument("--limit", type=int, help="tasks of a set")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument(
        "--answers", type=Path, help="a pickle of the target's answers; made if it is not there"
    )
    parser.add_argument(
        "--seconds", type=float, help="no run begins that would not end within so many"
    )
    parser.add_argument("--only", default="", help="runs by name, with commas")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the run `combined`"
    )
    parser.add_argument(
        "--base", action="append", default=[], metavar="KEY=VALUE", help="of all runs"
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        base = {"data": options.data, "steps": options.steps, "save_every": NEVER, "eval_every": 0}
        only = [word for word in options.only.split(",") if word]
        ladder = read_ladder(
            options.ladder, base | dict(pairs(options.base)), dict(pairs(options.set)), only
        )
        return 1 if climb(ladder, options) else 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
