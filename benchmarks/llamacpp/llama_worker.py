"""llama.cpp as a worker process: it loads a GGUF file once, and measures on request.

    python benchmarks/llamacpp/llama_worker.py MODEL.gguf THREADS CONTEXT SEQUENCES

Requests and replies are lines of JSON (worker.py describes them). It runs in the environment of
llama-cpp-python, imports nothing of peagle, and uses the low-level API: one `llama_decode` call
computes one token of every sequence.
"""

import json
import platform
import sys
import time
from typing import Any

import llama_cpp as api
import numpy as np

MAX_BATCH = 512  # tokens of one `llama_decode` call


class LlamaModel:
    def __init__(self, path: str, threads: int, context: int, sequences: int) -> None:
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot read {path}")
        params = api.llama_context_default_params()
        params.n_ctx = context * sequences
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = MAX_BATCH
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = sequences == 1
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp cannot create a context")
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(MAX_BATCH, 0, 1)

    def clear(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.context), True)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One pass over rows of (token, position, sequence, whether its logits are needed)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, needed) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = needed
        if api.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")

    def logits(self, row: int) -> np.ndarray:
        """[vocabulary] of a row of the last pass, valid until the next one."""
        pointer = api.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, shape=(self.vocabulary,))

    def prefill(self, ids: list[int], sequence: int) -> int:
        """Compute a prompt; return the most likely next token."""
        last = len(ids) - 1
        rows = [(token, i, sequence, i == last) for i, token in enumerate(ids)]
        for start in range(0, len(rows), MAX_BATCH):
            chunk = rows[start : start + MAX_BATCH]
            self.run(chunk)
        return int(self.logits(len(chunk) - 1).argmax())

    def decode(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Greedy answers of exactly `max_tokens` tokens, all prompts at the same time."""
        self.clear()
        started = time.perf_counter()
        answers = [[self.prefill(ids, sequence)] for sequence, ids in enumerate(prompts)]
        prefilled = time.perf_counter()
        for step in range(max_tokens - 1):
            self.run(
                [(answer[-1], len(prompts[i]) + step, i, True) for i, answer in enumerate(answers)]
            )
            for i, answer in enumerate(answers):
                answer.append(int(self.logits(i).argmax()))
        return {
            "prefill_seconds": prefilled - started,
            "decode_seconds": time.perf_counter() - prefilled,
            "decoded_tokens": len(prompts) * (max_tokens - 1),
            "answers": answers,
        }

    def time_prefill(self, ids: list[int]) -> dict[str, Any]:
        self.clear()
        started = time.perf_counter()
        self.prefill(ids, 0)
        return {"prefill_seconds": time.perf_counter() - started}

    def score(self, ids: list[int], path: str) -> dict[str, Any]:
        """Save the logits of every position, float32 [tokens, vocabulary], as a file of numpy."""
        self.clear()
        logits = np.empty((len(ids), self.vocabulary), dtype=np.float32)
        for start in range(0, len(ids), MAX_BATCH):
            chunk = ids[start : start + MAX_BATCH]
            self.run([(token, start + i, 0, True) for i, token in enumerate(chunk)])
            for i in range(len(chunk)):
                logits[start + i] = self.logits(i)
        np.save(path, logits)
        return {"shape": logits.shape}

    def describe(self) -> dict[str, Any]:
        return {
            "version": f"llama-cpp-python {api.__version__}, Python {platform.python_version()}",
            "kernels": api.llama_print_system_info().decode(),
            "weight_bytes": api.llama_model_size(self.model),
            "threads": api.llama_n_threads(self.context),
        }


def answer(model: LlamaModel, request: dict[str, Any]) -> dict[str, Any]:
    kind = request["kind"]
    if kind == "describe":
        return model.describe()
    if kind == "prefill":
        return model.time_prefill(request["ids"])
    if kind == "score":
        return model.score(request["ids"], request["path"])
    if kind == "decode":
        return model.decode(request["prompts"], request["max_tokens"])
    raise SystemExit(f"unknown request {kind!r}")


def main(path: str, threads: str, context: str, sequences: str) -> None:
    model = LlamaModel(path, int(threads), int(context), int(sequences))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
