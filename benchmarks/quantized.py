"""What a quantized target costs and gives: the shipped pair in bf16, fp8, int8 and int4, the same drafters.

    python -m tests.measure_quantized make WORK DATA [--prompts 8]     the targets, the drafters for vLLM, the prompts
    python -m tests.measure_quantized run WORK OUT.json [--seconds 540] [--tokens 128] [-k 7] [--speed] [--quick]
    python tests/vllm/measure_quantized.py WORK OUT.json               the same in vLLM, in its own environment

DATA: the folder with humaneval.jsonl, mt_bench.jsonl, gsm8k.jsonl. Greedy, in exact mode where it can be had (not with
`--quick`), one request at a time: the acceptance length, the answers beside those of bf16, how many of them repeat
themselves (that is easy to draft), and that drafts change nothing. Along bf16's answers, by what the codes stand for:
the KL divergence of the target's distribution from bf16's, and the share of tokens that stay the likeliest. `--speed`:
tokens a second too, not exact, as a ratio to bf16 with the same method. OUT is written after every cell; what did not
fit the time is not in it.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.vllm.quantized import agreement
from peagle.bench.step_cost import measure_prompts
from peagle.core import METHODS, Generation, Method, parse_method
from peagle.data.bench import read_sets
from peagle.evaluate.evaluate import summarize
from peagle.export.export import export
from peagle.loaded import LoadedPair, load
from peagle.regenerate.repetition import is_repetitive
from peagle.target.quantized.formats import FORMATS
from peagle.target.quantized.write import quantize

PAIR, PLAIN = "smollm2-135m", "bf16"
SETS = ("humaneval", "mt_bench", "gsm8k")
Json = dict[str, Any]


def make(work: Path, data: Path, count: int) -> None:
    """WORK/bf16 (a link), fp8, int8, int4, drafters/, prompts.json."""
    pair = load(PAIR, dtype="bfloat16", device="cpu")
    source = pair.target.folder
    assert source is not None
    work.mkdir(parents=True, exist_ok=True)
    (work / PLAIN).unlink(missing_ok=True)
    (work / PLAIN).symlink_to(source)
    for name, to in FORMATS.items():
        if not (work / name / "config.json").is_file():
            print(json.dumps(quantize(source, work / name, to).as_dict()), flush=True)
    served = {"name_or_path": str(source), "architectures": pair.target.model.config.architectures}
    for method in pair.pair.drafters:
        export(pair.drafter(method), work / "drafters" / method, "vllm", pair.pair.k, served)
    prompts = {
        name: [pair.encode([{"role": "user", "content": task.turns[0]}]) for task in tasks]
        for name, tasks in read_sets(list(SETS), data, count).items()
    }
    (work / "prompts.json").write_text(json.dumps(prompts))


def answered(
    pair: LoadedPair,
    method: Method,
    k: int,
    prompts: list[list[int]],
    tokens: int,
    exact: bool | None,
) -> list[Generation]:
    return [pair.generate(ids, k, method, tokens, exact=exact) for ids in prompts]


def distribution(pair: LoadedPair, ids: list[int], answer: list[int]) -> Tensor:
    """[tokens, vocabulary] log-probabilities of an answer's tokens, in one pass."""
    logits = pair.target.forward(torch.tensor(ids + answer, device=pair.target.device)).logits
    return logits[len(ids) - 1 : -1].float().log_softmax(-1).cpu()


class Measuring:
    def __init__(
        self, work: Path, out: Path, tokens: int, k: int, device: str, speed: bool, quick: bool
    ) -> None:
        self.work, self.out, self.tokens, self.k, self.device, self.speed = (
            work,
            out,
            tokens,
            k,
            device,
            speed,
        )
        self.exact = False if quick else None
        self.prompts: dict[str, list[list[int]]] = json.loads((work / "prompts.json").read_text())
        self.answers: dict[tuple[str, Method, str], list[list[int]]] = {}
        self.speeds: dict[Method, float] = {}  # of bf16
        self.distributions: dict[str, list[Tensor]] = {}  # bf16's, [tokens, vocabulary] each
        self.cells: list[Json] = []

    def run(self, formats: list[str], methods: list[Method], end: float) -> None:
        for name in formats:
            if time.monotonic() > end:
                return
            pair = load(PAIR, target=self.work / name, dtype="bfloat16", device=self.device)
            for label in self.prompts:
                for method in methods:
                    if time.monotonic() < end:
                        self.tell(pair, self.cell(pair, name, method, label))
            for method in methods if self.speed else ():
                if time.monotonic() < end:
                    self.tell(pair, self.timed(pair, name, method))

    def cell(self, pair: LoadedPair, name: str, method: Method, label: str) -> Json:
        got = answered(pair, method, self.k, self.prompts[label], self.tokens, self.exact)
        answers = self.answers[name, method, label] = [one.token_ids for one in got]
        cell: Json = {
            "format": name,
            "method": method,
            "set": label,
            "weights": got[0].weights,
            "exact": got[0].exact,
        }
        if method == "none":
            cell |= {"repetitive": sum(map(is_repetitive, answers))} | self.apart(pair, name, label)
        else:
            found = summarize((step for one in got for step in one.steps), self.k)
            cell["acceptance_length"] = round(found.acceptance_length, 4)
            cell["per_position"] = [round(share, 4) for share in found.accepted_per_position]
            if (name, "none", label) in self.answers:
                cell["as_none"] = agreement(self.answers[name, "none", label], answers)
        if name != PLAIN and (PLAIN, method, label) in self.answers:
            cell["as_bf16"] = agreement(self.answers[PLAIN, method, label], answers)
        return cell

    def apart(self, pair: LoadedPair, name: str, label: str) -> Json:
        """The distributions along bf16's answers."""
        if (PLAIN, "none", label) not in self.answers:
            return {}
        texts = zip(self.prompts[label], self.answers[PLAIN, "none", label], strict=True)
        found = [distribution(pair, ids, answer) for ids, answer in texts]
        if name == PLAIN:
            self.distributions[label] = found
            return {}
        pairs = [
            (p.float(), q.float()) for p, q in zip(self.distributions[label], found, strict=True)
        ]
        divergence = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in pairs]).mean()
        kept = torch.cat([(p.argmax(-1) == q.argmax(-1)).float() for p, q in pairs]).mean()
        return {"kl": round(float(divergence), 5), "likeliest_kept": round(float(kept), 4)}

    def timed(self, pair: LoadedPair, name: str, method: Method) -> Json:
        """All prompts, one request at a time."""
        prompts = [ids for of_set in self.prompts.values() for ids in of_set]
        speed = measure_prompts(pair, method, self.k, 1, prompts, self.tokens, 2).tokens_per_second
        if name == PLAIN:
            self.speeds[method] = speed
        cell: Json = {"format": name, "method": method, "tokens_per_second": round(speed, 1)}
        return cell | (
            {"of_bf16": round(speed / self.speeds[method], 3)} if method in self.speeds else {}
        )

    def tell(self, pair: LoadedPair, cell: Json) -> None:
        self.cells.append(cell)
        head = {"tokens": self.tokens, "k": self.k, "device": str(pair.target.device)}
        sizes = {name: weights(self.work / name) for name in (PLAIN, *FORMATS)}
        self.out.write_text(json.dumps(head | {"bytes": sizes, "cells": self.cells}, indent=1))
        print(json.dumps(cell), flush=True)


def weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("work", type=Path)
    making.add_argument("data", type=Path)
    making.add_argument("--prompts", type=int, default=8)
    running = commands.add_parser("run")
    running.add_argument("work", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--formats", default=",".join([PLAIN, *FORMATS]))
    running.add_argument(
        "--methods", default=",".join(METHODS), help="none first: the others are compared with it"
    )
    running.add_argument("--seconds", type=float, default=540)
    running.add_argument("--tokens", type=int, default=128)
    running.add_argument("-k", type=int, default=7)
    running.add_argument("--device", default="auto")
    running.add_argument("--speed", action="store_true")
    running.add_argument("--quick", action="store_true", help="not exact: near ties may part")
    asked = parser.parse_args()
    if asked.command == "make":
        make(asked.work, asked.data, asked.prompts)
        return
    measuring = Measuring(
        asked.work, asked.out, asked.tokens, asked.k, asked.device, asked.speed, asked.quick
    )
    methods = [parse_method(word) for word in asked.methods.split(",")]
    measuring.run(asked.formats.split(","), methods, time.monotonic() + asked.seconds)


if __name__ == "__main__":
    main()
