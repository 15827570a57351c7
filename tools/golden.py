"""Record what the product answers, so that a refactor can prove that nothing changed.

    python -m tools.golden record OLD      # token ids, HTTP bodies, training losses
    python -m tools.golden compare OLD NEW

Only the command line, the HTTP API and `peagle.load(...).generate(...)` are used: names inside the
package may change between two recordings. Both recordings must come from the same machine.
"""

import hashlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PAIR = "smollm2-135m"
PROMPTS = [
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "Write a Python function that reverses a string.",
    "What is the capital of France?",
    "List five fruits.",
    "Explain recursion to a child.",
    "If I have 3 apples and buy 5 more, how many do I have?",
    "Translate 'good morning' into Spanish.",
    "Write a SQL query that counts the users of each country.",
    "Summarize the plot of Romeo and Juliet.",
    "Write a limerick about a cat.",
    "What is 17 times 23?",
    "Give three tips for better sleep.",
    "Write a Python class for a stack.",
    "Who wrote War and Peace?",
    "Describe how a bicycle works.",
    "Write an email that declines an invitation.",
    "What causes the seasons?",
    "Write a JSON object that describes a book.",
    "Count from one to ten in German.",
]
FORMS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "eagle3": {"method": "eagle3", "k": 5},
    "p-eagle": {"method": "p-eagle", "k": 7},
    "tree": {"method": "p-eagle", "k": 7, "tree": 15},
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MASKED = re.compile(r'"(id|created|system_fingerprint|request_id)":\s*("[^"]*"|\d+)')
TIMES = re.compile(r'"[a-z_]*(seconds|_ms|per_second|uptime)[a-z_]*":\s*[\d.e-]+')


def record_tokens(dtype: str, tokens: int) -> dict[str, list[int]]:
    import peagle

    pair = peagle.load(PAIR, dtype=dtype, device="cpu")
    recorded = {}
    for form, arguments in FORMS.items():
        for name, sampling in SAMPLINGS.items():
            for number, prompt in enumerate(PROMPTS):
                answer = pair.generate(prompt, max_tokens=tokens, **arguments, **sampling)
                recorded[f"{form} {name} {number}"] = answer.token_ids
        print(f"{dtype} {form}: recorded", flush=True)
    return recorded


@contextmanager
def running_server(*options: str) -> Iterator[httpx.Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "peagle",
        "serve",
        PAIR,
        "--port",
        str(port),
        "--dtype",
        "float32",
        *options,
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            deadline = time.monotonic() + 180
            while time.monotonic() < deadline:
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.5)
            yield client
    finally:
        server.terminate()
        server.wait(60)


def chat(text: str = PROMPTS[0], **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return CHAT, {"messages": messages, "temperature": 0, "max_tokens": 24} | fields


def complete(prompt: Any = "The capital of France is", **fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": prompt, "temperature": 0, "max_tokens": 16} | fields


def requests() -> list[tuple[str, dict[str, Any]]]:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    return [
        *[chat(prompt) for prompt in PROMPTS[:4]],
        chat(stream=True),
        chat(stream=True, stream_options={"include_usage": True}),
        chat(logprobs=True, top_logprobs=3),
        chat(logprobs=True, top_logprobs=2, stream=True),
        chat(temperature=0.7, seed=3),
        chat(temperature=1.0, top_k=20, min_p=0.05, seed=4, n=2),
        chat(stop=["the"]),
        chat(max_completion_tokens=5),
        chat(frequency_penalty=1.0, presence_penalty=0.5),
        chat(repetition_penalty=1.2, logit_bias={"28": -10}),
        chat(min_tokens=20, ignore_eos=True),
        chat(response_format={"type": "json_object"}),
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": schema},
            }
        ),
        chat(peagle={"method": "none"}),
        chat(peagle={"k": 3}),
        complete(),
        complete(["One, two,", "Red, green,"]),
        complete([504, 1343, 282]),
        complete(echo=True, logprobs=2),
        complete(echo=True, logprobs=1, max_tokens=0),
        complete(stream=True, logprobs=1),
        complete(stop=["\n"], include_stop_str_in_output=True, max_tokens=40),
        ("/tokenize", {"prompt": "Hello there"}),
        ("/detokenize", {"tokens": [19556, 665]}),
        chat(model="unknown"),
        chat(temperature=-1),
    ]


def masked(body: str) -> str:
    return TIMES.sub('"TIME":0', MASKED.sub(r'"\1":"MASKED"', body))


def record_bodies() -> dict[str, str]:
    recorded = {}
    with running_server("-k", "5", "--tree", "0") as client:
        for number, (path, body) in enumerate(requests()):
            reply = client.post(path, json=body)
            text = masked(reply.text)
            if body.get(
                "stream"
            ):  # how many steps share a chunk depends on timing: join the text of all chunks
                text = joined_stream(text)
            recorded[f"{number:02} {path}"] = f"{reply.status_code} {text}"
        metrics = client.get("/metrics").text
        names = sorted(
            {
                line.split("{")[0].split(" ")[0]
                for line in metrics.splitlines()
                if not line.startswith("#")
            }
        )
        recorded["metric names"] = "\n".join(names)
        recorded["models"] = masked(client.get("/v1/models").text)
    return recorded


def joined_stream(text: str) -> str:
    """Everything the chunks say, in order, with pieces of text joined."""
    parts: list[str] = []
    content = ""
    for line in text.split("\n\n"):
        if not line.startswith("data: {"):
            parts.append(line)
            continue
        chunk = json.loads(line.removeprefix("data: "))
        for choice in chunk.get("choices", []):
            delta = choice.get("delta", {})
            content += delta.pop("content", None) or choice.pop("text", None) or ""
            logprobs = choice.pop("logprobs", None)
            parts.append(json.dumps(logprobs, sort_keys=True) if logprobs else "")
        if chunk.get("usage"):
            parts.append(json.dumps(chunk["usage"], sort_keys=True))
        reasons = [choice.get("finish_reason") for choice in chunk.get("choices", [])]
        parts.append(str([reason for reason in reasons if reason]) if any(reasons) else "")
    return content + "\n" + "\n".join(part for part in parts if part)


def record_losses(folder: Path) -> dict[str, list[float]]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    answers = folder / "answers"
    peagle_command(
        "regenerate",
        "--prompts",
        str(prompts),
        "--out",
        str(answers),
        "--max-tokens",
        "48",
        "--keep-truncated",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    )
    text = (answers / "answers.jsonl").read_text()
    recorded: dict[str, Any] = {
        "answers": hashlib.sha256("".join(sorted(text.splitlines())).encode()).hexdigest()
    }
    for method, more in {
        "p-eagle": ["dependency=16", "confidence=true", "segments=2"],
        "eagle3": [],
    }.items():
        out = folder / method
        settings = [
            f"data={answers}",
            f"out={out}",
            f"method={method}",
            "layers=1",
            "k=4",
            "steps=20",
            "log_every=1",
            "draft_vocab=2048",
            "held_out=2",
            "pack_tokens=512",
            "dtype=float32",
            "device=cpu",
            *more,
        ]
        peagle_command("train", *[word for setting in settings for word in ("--set", setting)])
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        recorded[method] = [line["loss"] for line in lines if "loss" in line]
        print(f"{method}: {len(recorded[method])} losses", flush=True)
    return recorded


def peagle_command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "peagle", *words], check=True, stdout=subprocess.DEVNULL)


def record(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts = {
        "float32": lambda: record_tokens("float32", 40),
        "bfloat16": lambda: record_tokens("bfloat16", 40),
        "bodies": record_bodies,
        "losses": lambda: record_losses(folder),
    }
    for name, part in parts.items():
        path = folder / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(part(), indent=1))


def compare(old: Path, new: Path) -> int:
    different = 0
    for name in ("float32", "bfloat16", "bodies", "losses"):
        before, after = (json.loads((folder / f"{name}.json").read_text()) for folder in (old, new))
        changed = [key for key in before if before[key] != after.get(key)]
        different += len(changed)
        print(f"{name}: {len(before) - len(changed)} of {len(before)} identical")
        for key in changed[:10]:
            print(f"  {key}\n    - {str(before[key])[:600]}\n    + {str(after.get(key))[:600]}")
    return 1 if different else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"] and len(sys.argv) == 3:
        record(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["compare"] and len(sys.argv) == 4:
        sys.exit(compare(Path(sys.argv[2]), Path(sys.argv[3])))
    else:
        sys.exit("usage: python -m tools.golden record DIR | compare OLD NEW")
