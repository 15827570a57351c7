"""How far float and int8 activations, and llama.cpp, are from the answer of the stored weights.

    python -m benchmarks.quantized.int8_divergence DATA [LLAMA_PYTHON] [--gguf FILE] [--prompts 8]

The reference is transformers in float32 with the dequantized weights of the GGUF file. Along the
target's own greedy answers to prompts of humaneval, gsm8k and mt_bench, every engine scores the
same token ids. Printed for each engine and set, over the tokens of the answers:

    KL         mean of KL(reference || engine), in nats per token, and its 99th percentile
    top-1      share of positions where both have the same most likely token
    logits     norm of the difference of the logits, relative to the norm of the reference's
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from benchmarks.llamacpp.worker import Worker, llama_worker, peagle_worker
from peagle.bench.environment import describe_environment
from peagle.catalog import DEFAULT_PAIR, find_pair
from peagle.data.bench import read_sets
from peagle.machine import available_cores
from peagle.paths import write_json
from peagle.pull.pull import target_folder

SETS = ("humaneval", "gsm8k", "mt_bench")
CONTEXT = 1024
RECORD = Path(__file__).parents[2] / "docs" / "results" / "llamacpp" / "divergence.json"

Score = Callable[[list[int]], Tensor]  # token ids -> logits [tokens, vocabulary]


@dataclass(frozen=True, slots=True)
class Text:
    prompt: list[int]
    answer: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer

    def answer_rows(self, logits: Tensor) -> Tensor:
        """Of logits [tokens, vocabulary], those that predict the tokens of the answer."""
        return logits[len(self.prompt) - 1 : -1]


@dataclass(frozen=True, slots=True)
class Divergence:
    set: str
    engine: str
    tokens: int
    kl: float
    kl_p99: float
    top1: float
    logits: float


class Measured:
    """Sums of the differences between an engine and the reference over the texts of a set."""

    def __init__(self) -> None:
        self.kl: list[Tensor] = []
        self.agreeing: list[Tensor] = []
        self.squares = [0.0, 0.0]  # of the differences, and of the reference's logits

    def add(self, reference: Tensor, logits: Tensor) -> None:
        p = reference.double().log_softmax(-1)
        q = logits.double().log_softmax(-1)
        self.kl.append((p.exp() * (p - q)).sum(-1))
        self.agreeing.append((reference.argmax(-1) == logits.argmax(-1)).double())
        self.squares[0] += float((reference - logits).double().square().sum())
        self.squares[1] += float(reference.double().square().sum())

    def result(self, set_name: str, engine: str) -> Divergence:
        kl = torch.cat(self.kl)
        return Divergence(
            set_name,
            engine,
            len(kl),
            kl=float(kl.mean()),
            kl_p99=float(kl.quantile(0.99)),
            top1=float(torch.cat(self.agreeing).mean()),
            logits=(self.squares[0] / self.squares[1]) ** 0.5,
        )


class Engines:
    """The reference in this process, and each engine in its own."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.path = str(folder / "logits.npy")
        self.reference = load_reference(options.gguf)
        self.workers: list[Worker] = []
        self.scores: dict[str, Score] = {}
        self.skipped: dict[str, str] = {}
        for dtype in options.dtypes.split(","):
            worker = peagle_worker(options.pair, options.gguf, dtype, options.threads, CONTEXT)
            self.workers.append(worker)
            self.add_peagle(worker)
        self.peagle = self.workers[0]
        if options.llama_python:
            worker = llama_worker(options.llama_python, options.gguf, options.threads, CONTEXT)
            self.workers.append(worker)
            self.scores["llama.cpp"] = self.score_by(worker, {})

    def add_peagle(self, worker: Worker) -> None:
        """Both kinds of activations, as far as this machine supports them."""
        for int8 in (False, True):
            description = worker.ask("describe", int8=int8)
            activations = "int8" if int8 else "float"
            if "error" in description:
                self.skipped[f"peagle {activations}"] = description["error"]
            else:
                name = f"peagle {description['weights']}, {description['dtype']}, {activations}"
                self.scores[name] = self.score_by(worker, {"int8": int8})

    def score_by(self, worker: Worker, fields: dict[str, Any]) -> Score:
        def score(ids: list[int]) -> Tensor:
            worker.ask("score", ids=ids, path=self.path, **fields)
            return torch.from_numpy(numpy.load(self.path))

        return score

    @torch.inference_mode()
    def reference_logits(self, ids: list[int]) -> Tensor:
        return self.reference(torch.tensor([ids])).logits[0].float()

    def answers(self, texts: list[str], max_tokens: int) -> list[Text]:
        prompts = self.peagle.ask("encode", texts=texts)["prompts"]
        fields = {"method": "none", "int8": False, "ignore_eos": False, "max_tokens": max_tokens}
        return [
            Text(ids, self.peagle.ask("decode", prompts=[ids], **fields)["answers"][0])
            for ids in prompts
            if len(ids) + max_tokens <= CONTEXT
        ]


def load_reference(gguf: Path) -> Any:
    """transformers' model in float32, with the weights exactly as the file stores them."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, local_files_only=True, trust_remote_code=False
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    tensors = load_gguf_checkpoint(
        str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )["tensors"]
    tied = {"lm_head.weight"} if "lm_head.weight" not in tensors else set()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) == tied and not unexpected, (missing, unexpected)
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model.eval()


def compare_set(engines: Engines, name: str, texts: list[Text]) -> list[Divergence]:
    measured = {engine: Measured() for engine in engines.scores}
    for text in texts:
        reference = text.answer_rows(engines.reference_logits(text.ids))
        for engine, score in engines.scores.items():
            measured[engine].add(reference, text.answer_rows(score(text.ids)))
    return [sums.result(name, engine) for engine, sums in measured.items()]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Divergence from the stored weights' answer.")
    parser.add_argument("data", type=Path)
    parser.add_argument("llama_python", nargs="?")
    parser.add_argument("--pair", default=DEFAULT_PAIR)
    parser.add_argument("--gguf", type=Path, help="default: model.gguf of the pulled target")
    parser.add_argument(
        "--dtypes", default="auto", help="dtypes of peagle's activations, with commas"
    )
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    folder = target_folder(find_pair(options.pair))
    options.gguf = (options.gguf or folder / "model.gguf").resolve()
    if not options.gguf.is_file():
        parser.error(f"no GGUF file at {options.gguf}: run `peagle pull`, or use --gguf")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    results: list[Divergence] = []
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(options, Path(folder))
        for name in SETS:
            tasks = read_sets([name], options.data, options.prompts)[name]
            texts = engines.answers([task.turns[0] for task in tasks], options.tokens)
            for result in compare_set(engines, name, texts):
                results.append(result)
                print(
                    f"{name:10} {result.engine:40} KL {result.kl:.6f} (p99 {result.kl_p99:.4f}),"
                    f" top-1 {result.top1:.2%}, logits {result.logits:.5f}"
                    f" ({result.tokens} tokens)",
                    flush=True,
                )
        for worker in engines.workers:
            worker.close()
    for name, reason in engines.skipped.items():
        print(f"{name}: not measured: {reason}")
    record = {
        "format": "peagle-divergence/1",
        "environment": describe_environment(torch.device("cpu")),
        "gguf": options.gguf.name,
        "results": [asdict(result) for result in results],
        "skipped": engines.skipped,
    }
    write_json(options.out, record)
    print(f"record: {options.out}")


if __name__ == "__main__":
    main()
