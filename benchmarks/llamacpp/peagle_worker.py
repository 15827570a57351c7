"""peagle as a worker process: it loads a pair once, and measures on request (see worker.py).

    python -m benchmarks.llamacpp.peagle_worker PAIR TARGET DTYPE THREADS CONTEXT

TARGET is a GGUF file, which runs as stored, or "" for the pair's own target.
"""

import json
import sys
import time
from typing import Any

import torch

from benchmarks.engine.scoring import score
from peagle.bench.environment import describe_environment
from peagle.bench.step_cost import tensor_bytes
from peagle.core import Method
from peagle.engine import Engine, EngineConfig
from peagle.engine.gc_tuning import freeze_live_objects
from peagle.errors import UserError
from peagle.loaded import load

EngineKey = tuple[Method, bool, int]  # method, int8, requests at once


class PeagleModel:
    def __init__(self, pair: str, target: str, dtype: str, context: int) -> None:
        self.pair = load(pair, target=target or None, dtype=dtype, device="cpu")
        self.context = context
        self.engines: dict[EngineKey, Engine] = {}

    def engine(self, method: Method = "none", int8: bool = False, batch: int = 1) -> Engine:
        key = (method, int8, batch)
        if key not in self.engines:
            config = EngineConfig(
                method=method,
                max_batch=batch,
                context=self.pair.target.fit_context(self.context),
                kv_tokens=batch * (self.context + 64),
                prefill_chunk=self.context,
                exact=False,
                prefix_caching=False,
                int8=int8,
                thread=False,
            )
            self.engines[key] = Engine(self.pair, config)
            self.engines[key].warm_up()
            freeze_live_objects()  # A full collection takes as long as dozens of steps.
        return self.engines[key]

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        """Greedy answers to all prompts at the same time.

        Decoding is timed from the moment when every request has its first token to the end of the
        last one.
        """
        prompts = request["prompts"]
        engine = self.engine(request["method"], request["int8"], len(prompts))
        options = {"ignore_eos": request.get("ignore_eos", True)}
        started = time.perf_counter()
        streams = [engine.add(ids, max_tokens=request["max_tokens"], **options) for ids in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        prefilled = 0.0
        prefilled_tokens = 0
        while not all(stream.ended for stream in streams):
            engine.step()
            for stream, answer in zip(streams, answers, strict=True):
                for piece in stream.poll():
                    answer += piece.step.tokens if piece.step else []
            if not prefilled and all(answers):
                prefilled = time.perf_counter()
                prefilled_tokens = sum(map(len, answers))
        return {
            "prefill_seconds": prefilled - started,
            "decode_seconds": time.perf_counter() - prefilled,
            "decoded_tokens": sum(map(len, answers)) - prefilled_tokens,
            "answers": answers,
            "acceptance_length": engine.metrics.acceptance_length,
        }

    def time_prefill(self, request: dict[str, Any]) -> dict[str, Any]:
        engine = self.engine(request["method"], request["int8"])
        started = time.perf_counter()
        stream = engine.add(request["ids"], max_tokens=1)
        while not stream.ended:
            engine.step()
            stream.poll()
        return {"prefill_seconds": time.perf_counter() - started}

    def score(self, request: dict[str, Any]) -> dict[str, Any]:
        import numpy

        logits = score(self.engine("none", request["int8"]), request["ids"])
        numpy.save(request["path"], logits.numpy())
        return {"shape": list(logits.shape)}

    def describe(self, request: dict[str, Any]) -> dict[str, Any]:
        engine = self.engine("none", request["int8"])
        environment = describe_environment(self.pair.target.device)
        return {
            "version": f"peagle {environment['peagle']}",
            "environment": environment,
            "kernels": engine.status()["kernels"],
            "dtype": str(self.pair.target.dtype).removeprefix("torch."),
            "weights": engine.weights,
            "weight_bytes": weight_bytes(engine),
            "threads": torch.get_num_threads(),
        }


def weight_bytes(engine: Engine) -> int:
    """The bytes of weights that a pass of the target reads, in the layout of its kernels."""
    verifier: Any = engine.loop.stepper.verifier
    if not hasattr(verifier, "lm_head"):  # transformers' own modules
        raise UserError("the bytes of weights are known for Llama-like targets only")
    weights = [weight for layer in verifier.layers for weight in layer.weights]
    return sum(
        tensor_bytes(weight.weight) if weight.matrix is None else weight.matrix.nbytes
        for weight in [*weights, verifier.lm_head]
    )


def answer(model: PeagleModel, request: dict[str, Any]) -> dict[str, Any]:
    """What is not supported here, such as int8 on some CPUs, is reported and not measured."""
    kinds = {
        "describe": model.describe,
        "decode": model.decode,
        "prefill": model.time_prefill,
        "score": model.score,
        "encode": lambda request: {"prompts": [model.pair.encode(x) for x in request["texts"]]},
    }
    try:
        return kinds[request["kind"]](request)
    except UserError as error:
        return {"error": str(error)}


def main(pair: str, target: str, dtype: str, threads: str, context: str) -> None:
    torch.set_num_threads(int(threads))
    model = PeagleModel(pair, target, dtype, int(context))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
