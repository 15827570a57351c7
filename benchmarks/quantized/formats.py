"""Costs and gains of a quantized target: the shipped pair in bf16, fp8, int8, int4, same drafters.

    python -m benchmarks.quantized.formats make WORK DATA [--prompts 8]
    python -m benchmarks.quantized.formats run WORK OUT.json [--seconds 540] [--tokens 128] [-k 7]
                                                     [--speed] [--quick]
    python benchmarks/vllm/quantized.py WORK OUT.json    # in vLLM, in its own environment

`make` writes the targets, the drafters for vLLM and the prompts; DATA is the folder with
humaneval.jsonl, mt_bench.jsonl and gsm8k.jsonl.

`run` decodes greedily, one request at a time, in exact mode where it is supported (not with
`--quick`). It records the acceptance length, the agreement of the answers with those of bf16, the
number of repetitive answers (these are easy to draft), and that drafts change nothing. Along the
answers of bf16, it records the KL divergence of the dequantized target from bf16 and the fraction
of tokens that stay the likeliest. With `--speed` it also records tokens per second, not in exact
mode, as a ratio to bf16 with the same method. OUT is written after every cell; cells that did not
fit into the time are missing.
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
from peagle.target.quantized.formats import WEIGHT_FORMATS
from peagle.target.quantized.write import quantize

PAIR = "smollm2-135m"
PLAIN = "bf16"
SETS = ("humaneval", "mt_bench", "gsm8k")
Json = dict[str, Any]


def make(work: Path, data: Path, count: int) -> None:
    """Write WORK/bf16 (a link), fp8, int8, int4, drafters/, prompts.json."""
    pair = load(PAIR, dtype="bfloat16", device="cpu")
    source = pair.target.folder
    assert source is not None
    work.mkdir(parents=True, exist_ok=True)
    (work / PLAIN).unlink(missing_ok=True)
    (work / PLAIN).symlink_to(source)
    for name, to in WEIGHT_FORMATS.items():
        if not (work / name / "config.json").is_file():
            print(json.dumps(quantize(source, work / name, to).as_dict()), flush=True)
    for method in pair.pair.drafters:
        export(pair.drafter(method), work / "drafters" / method, "vllm", pair.pair.k)
    prompts = {
        name: [pair.encode([{"role": "user", "content": task.turns[0]}]) for task in tasks]
        for name, tasks in read_sets(list(SETS), data, count).items()
    }
    (work / "prompts.json").write_text(json.dumps(prompts))


def generate_answers(
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


class Benchmark:
    def __init__(
        self, work: Path, out: Path, tokens: int, k: int, device: str, speed: bool, quick: bool
    ) -> None:
        self.work = work
        self.out = out
        self.tokens = tokens
        self.k = k
        self.device = device
        self.speed = speed
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
                        self.record(pair, self.measure_cell(pair, name, method, label))
            for method in methods if self.speed else ():
                if time.monotonic() < end:
                    self.record(pair, self.measure_speed(pair, name, method))

    def measure_cell(self, pair: LoadedPair, name: str, method: Method, label: str) -> Json:
        generations = generate_answers(
            pair, method, self.k, self.prompts[label], self.tokens, self.exact
        )
        answers = self.answers[name, method, label] = [
            generation.token_ids for generation in generations
        ]
        cell: Json = {
            "format": name,
            "method": method,
            "set": label,
            "weights": generations[0].weights,
            "exact": generations[0].exact,
        }
        if method == "none":
            cell |= {"repetitive": sum(map(is_repetitive, answers))} | self.compare_distributions(
                pair, name, label
            )
        else:
            steps = (step for generation in generations for step in generation.steps)
            summary = summarize(steps, self.k)
            cell["acceptance_length"] = round(summary.acceptance_length, 4)
            cell["per_position"] = [round(share, 4) for share in summary.accepted_per_position]
            if (name, "none", label) in self.answers:
                cell["as_none"] = agreement(self.answers[name, "none", label], answers)
        if name != PLAIN and (PLAIN, method, label) in self.answers:
            cell["as_bf16"] = agreement(self.answers[PLAIN, method, label], answers)
        return cell

    def compare_distributions(self, pair: LoadedPair, name: str, label: str) -> Json:
        """KL divergence and agreement along the answers of bf16."""
        if (PLAIN, "none", label) not in self.answers:
            return {}
        texts = zip(self.prompts[label], self.answers[PLAIN, "none", label], strict=True)
        distributions = [distribution(pair, ids, answer) for ids, answer in texts]
        if name == PLAIN:
            self.distributions[label] = distributions
            return {}
        pairs = [
            (p.float(), q.float())
            for p, q in zip(self.distributions[label], distributions, strict=True)
        ]
        divergence = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in pairs]).mean()
        agreeing = torch.cat([(p.argmax(-1) == q.argmax(-1)).float() for p, q in pairs]).mean()
        return {"kl": round(float(divergence), 5), "likeliest_kept": round(float(agreeing), 4)}

    def measure_speed(self, pair: LoadedPair, name: str, method: Method) -> Json:
        """Tokens per second over all prompts, one request at a time."""
        prompts = [ids for of_set in self.prompts.values() for ids in of_set]
        speed = measure_prompts(pair, method, self.k, 1, prompts, self.tokens, 2).tokens_per_second
        if name == PLAIN:
            self.speeds[method] = speed
        cell: Json = {"format": name, "method": method, "tokens_per_second": round(speed, 1)}
        return cell | (
            {"of_bf16": round(speed / self.speeds[method], 3)} if method in self.speeds else {}
        )

    def record(self, pair: LoadedPair, cell: Json) -> None:
        self.cells.append(cell)
        head = {"tokens": self.tokens, "k": self.k, "device": str(pair.target.device)}
        sizes = {name: weight_bytes(self.work / name) for name in (PLAIN, *WEIGHT_FORMATS)}
        self.out.write_text(json.dumps(head | {"bytes": sizes, "cells": self.cells}, indent=1))
        print(json.dumps(cell), flush=True)


def weight_bytes(folder: Path) -> int:
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
    running.add_argument("--formats", default=",".join([PLAIN, *WEIGHT_FORMATS]))
    running.add_argument(
        "--methods", default=",".join(METHODS), help="none first: the others are compared with it"
    )
    running.add_argument("--seconds", type=float, default=540)
    running.add_argument("--tokens", type=int, default=128)
    running.add_argument("-k", type=int, default=7)
    running.add_argument("--device", default="auto")
    running.add_argument("--speed", action="store_true")
    running.add_argument("--quick", action="store_true", help="not exact: near ties may differ")
    options = parser.parse_args()
    if options.command == "make":
        make(options.work, options.data, options.prompts)
        return
    benchmark = Benchmark(
        options.work,
        options.out,
        options.tokens,
        options.k,
        options.device,
        options.speed,
        options.quick,
    )
    methods = [parse_method(word) for word in options.methods.split(",")]
    benchmark.run(options.formats.split(","), methods, time.monotonic() + options.seconds)


if __name__ == "__main__":
    main()
