"""All bars of the server on a GPU, in one run: `peagle serve` beside its engine in process.

    python -m benchmarks.serve_h200 --out $OUT/serve.json [--parts ready,pair,shape,soak]
        [--data FOLDER] [--http-workers 2] [--clients 4] [--soak-seconds 300] [--limit 550]
    python -m benchmarks.serve_h200 --endpoint http://127.0.0.1:8000 --parts endpoint
    python -m benchmarks.serve_h200 --smoke            # the tiny pair on a CPU, some minutes

Parts, each in processes of its own that end after `--limit` seconds:

    ready      seconds until /health is 200: with an empty Triton cache, and again; `generate` too
    pair       the default pair: engine in process, then streamed, at 1, 8, 64 and 256 streams
    shape      random weights in the shape of an 8B model, prompts of token ids, at 1, 8 and 64
    soak       benchmarks/soak.py: 200 streams, the engine killed once
    endpoint   the load of `pair` on another server, such as vLLM's own, at 1 and 64 streams

Results are added to `--out`, so that parts may run in several calls; the table shows all of them.
`--data`: the folder with humaneval.jsonl; without it there are three short prompts.

The machine needs the packages of `peagle[serve]`. Where they cannot be installed, carry them:

    pip install --target serve_packages --no-deps fastapi starlette pydantic pydantic_core \\
        annotated_types typing_inspection uvicorn h11 httptools uvloop click anyio sniffio idna \\
        prometheus_client llguidance msgspec pyzmq
    PYTHONPATH=.:serve_packages python -m benchmarks.serve_h200 ...

for the Python and the platform of that machine (`--python-version`, `--platform` and
`--only-binary :all:` if they differ from this one's). The target of the default pair must lie in
PEAGLE_HOME there (`peagle pull`).
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.server_process import ROOT, serving
from benchmarks.soak import PROMPTS, TINY_OPTIONS
from benchmarks.stream_load import Body, drive, request_body

PARTS = ("ready", "pair", "shape", "soak")
DEFAULT_PAIR = "smollm2-135m"
# By streams: the share of the engine in process that the server must reach.
PAIR_BARS = {1: 0.95, 8: 0.90, 64: 0.80, 256: 0.70}
SHAPE_BARS = {1: 0.97, 8: 0.97, 64: 0.97}
TTFT_BAR_MS = 60.0  # At 64 streams, p99.
READY_BARS = {"fresh": 40.0, "warm": 15.0, "generate fresh": 15.0}
SHAPE_READY_BAR = 60.0
SHAPE_PROMPT_TOKENS = 128
MIN_REQUESTS = 64
REQUESTS_PER_STREAM = 3


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    name: str
    value: float
    bar: str = ""
    passed: bool | None = None


@dataclass(frozen=True, slots=True)
class ServedPair:
    """How a pair is served: the arguments of `peagle serve`, and the same as settings."""

    arguments: list[str]
    settings: dict[str, Any]


def at_most(part: str, name: str, value: float, bar: float) -> Row:
    return Row(part, name, round(value, 2), f"<= {bar:g}", value <= bar)


def at_least(part: str, name: str, value: float, bar: float) -> Row:
    return Row(part, name, round(value, 3), f">= {bar:g}", value >= bar)


# --- the pairs ------------------------------------------------------------------------------------


@contextmanager
def pair_of(part: str, options: argparse.Namespace) -> Iterator[ServedPair]:
    """The default pair, or one of random weights; for a smoke test always the tiny one."""
    if not options.smoke and part != "shape":
        batch = str(max(PAIR_BARS))
        yield ServedPair(
            [options.pair, "--max-batch", batch], {"pair": options.pair, "max_batch": int(batch)}
        )
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        extra: dict[str, Any] = {"k": 5}
        words = ["-k", "5"]
        if options.smoke:
            from tests.support.serving import tiny_folder

            tiny_folder(folder)
            words = list(TINY_OPTIONS)
            extra = {"dtype": "float32", "device": "cpu", "kv_tokens": 65536, "k": 3}
        else:
            write_shape(folder)
        target = str(folder / "target")
        drafter = str(folder / "p-eagle")
        settings = {"pair": target, "drafter": drafter, **extra}
        yield ServedPair([target, "--drafter", drafter, *words], settings)


def write_shape(folder: Path) -> None:
    """In a process of its own, which gives its GPU memory back."""
    from peagle.catalog.catalog import find_pair
    from peagle.pull.pull import target_folder

    tokenizer = str(target_folder(find_pair(DEFAULT_PAIR)))
    command = [sys.executable, "-m", "benchmarks.shaped_pair", str(folder), tokenizer]
    subprocess.run(command, check=True, cwd=ROOT)


def read_prompts(data: Path | None) -> list[str]:
    if data is None:
        return list(PROMPTS)
    lines = (data / "humaneval.jsonl").read_text().splitlines()
    return [str(json.loads(line)["prompt"]) for line in lines[:MIN_REQUESTS]]


def id_prompts() -> list[list[int]]:
    return [[5 + (7 * i + j) % 80 for j in range(SHAPE_PROMPT_TOKENS)] for i in range(MIN_REQUESTS)]


# --- the parts ------------------------------------------------------------------------------------


def measure_ready(options: argparse.Namespace) -> list[Row]:
    rows = []
    with pair_of("ready", options) as pair, tempfile.TemporaryDirectory() as cache:
        for name in ("fresh", "warm"):
            environment = {"TRITON_CACHE_DIR": f"{cache}/serve"}
            with serving(pair.arguments, environment=environment) as server:
                rows.append(at_most("ready", name, server.ready_seconds, READY_BARS[name]))
        if not options.smoke:
            command = [sys.executable, "-m", "peagle", "generate", *pair.arguments[:1], PROMPTS[0]]
            variables = {**os.environ, "TRITON_CACHE_DIR": f"{cache}/generate"}
            started = time.perf_counter()
            subprocess.run([*command, "--max-tokens", "16"], check=True, env=variables, cwd=ROOT)
            seconds = time.perf_counter() - started
            rows.append(at_most("ready", "generate fresh", seconds, READY_BARS["generate fresh"]))
    return rows


def measure_speed(part: str, options: argparse.Namespace) -> list[Row]:
    """The engine in process, then the server, at every number of streams."""
    bars = PAIR_BARS if part == "pair" else SHAPE_BARS
    levels = [(1, 4), (4, 12)] if options.smoke else level_sizes(list(bars))
    prompts: Sequence[str | list[int]] = read_prompts(options.data)
    if part == "shape":
        prompts = id_prompts()
    rows: list[Row] = []
    with pair_of(part, options) as pair:
        engine = engine_speeds(pair, prompts, options.tokens, levels)
        arguments = [*pair.arguments, "--http-workers", str(options.http_workers)]
        with serving(arguments) as server:
            if part == "shape":
                rows.append(at_most(part, "ready s", server.ready_seconds, SHAPE_READY_BAR))
            drive(server.url, make_bodies(prompts, 8, 16), 4, 1)
            for streams, count in levels:
                result = drive(
                    server.url,
                    make_bodies(prompts, count, options.tokens),
                    streams,
                    options.clients,
                )
                rows += speed_rows(part, streams, engine[streams], result, bars.get(streams, 0.0))
    return rows


def speed_rows(part: str, streams: int, engine: float, result: Any, bar: float) -> list[Row]:
    name = f"{streams} streams"
    speed = result.tokens_per_second
    p99 = result.first_token_ms(0.99)
    ttft = Row(part, f"{name}: TTFT p99 ms", round(p99, 1))
    if part == "pair" and streams == 64:
        ttft = at_most(part, ttft.name, p99, TTFT_BAR_MS)
    errors = sum(result.errors.values())
    return [
        Row(part, f"{name}: engine tokens/s", engine),
        Row(part, f"{name}: server tokens/s", round(speed, 1)),
        at_least(part, f"{name}: server / engine", speed / engine, bar),
        ttft,
        at_most(part, f"{name}: errors", errors, 0),
    ]


def level_sizes(streams: list[int]) -> list[tuple[int, int]]:
    """With the number of requests at each: a single stream needs fewer."""
    return [(n, 16 if n == 1 else max(MIN_REQUESTS, REQUESTS_PER_STREAM * n)) for n in streams]


def make_bodies(prompts: Sequence[str | list[int]], count: int, tokens: int) -> list[Body]:
    return [request_body(prompts[i % len(prompts)], tokens) for i in range(count)]


def engine_speeds(
    pair: ServedPair,
    prompts: Sequence[str | list[int]],
    tokens: int,
    levels: list[tuple[int, int]],
) -> dict[int, float]:
    job = {"settings": pair.settings, "prompts": prompts, "tokens": tokens, "levels": levels}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine_load"],
        input=json.dumps(job).encode(),
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["streams"]: line["tokens_per_second"] for line in lines if "streams" in line}


def measure_soak(options: argparse.Namespace) -> list[Row]:
    from benchmarks.soak import soak

    load = argparse.Namespace(streams=200, seconds=options.soak_seconds, tokens=64, idle=0)
    load.kill = True
    if options.smoke:
        load.streams = 12
    with pair_of("soak", options) as pair, serving(pair.arguments) as server:
        passed = asyncio.run(soak(server, load))
    return [Row("soak", f"{load.streams} streams, {load.seconds:g} s", float(passed), "1", passed)]


def measure_endpoint(options: argparse.Namespace) -> list[Row]:
    prompts = read_prompts(options.data)
    rows = []
    for streams, count in level_sizes([1, 64]):
        bodies = make_bodies(prompts, count, options.tokens)
        result = drive(options.endpoint, bodies, streams, options.clients)
        speed = round(result.tokens_per_second, 1)
        rows.append(Row("endpoint", f"{streams} streams: tokens/s", speed))
    return rows


def run_part(part: str, options: argparse.Namespace) -> list[Row]:
    if part == "ready":
        return measure_ready(options)
    if part == "soak":
        return measure_soak(options)
    if part == "endpoint":
        return measure_endpoint(options)
    return measure_speed(part, options)


# --- one process for each part --------------------------------------------------------------------


def run_limited(part: str, arguments: list[str], limit: float) -> None:
    """Run one part in a process of its own; end it and its servers after `limit` seconds."""
    command = [sys.executable, "-m", "benchmarks.serve_h200", *arguments, "--only", part]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"{part}: not finished after {limit:g} seconds")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_rows(out: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(out.read_text())] if out.exists() else []


def add_rows(out: Path, part: str, rows: list[Row]) -> None:
    """Replace the results of a part."""
    kept = [row for row in read_rows(out) if row.part != part]
    fields = [{name: getattr(row, name) for name in Row.__slots__} for row in [*kept, *rows]]
    out.write_text(json.dumps(fields, indent=1))


def print_table(rows: list[Row]) -> None:
    for row in rows:
        verdict = {None: "", True: "passed", False: "FAILED"}[row.passed]
        print(f"{row.part:9} {row.name:32} {row.value:>12,} {row.bar:>9} {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("serve_h200.json"))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--pair", default=DEFAULT_PAIR)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--http-workers", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--soak-seconds", type=float, default=300.0)
    parser.add_argument("--limit", type=float, default=550.0, help="seconds of each part")
    parser.add_argument("--endpoint", help="the URL of another server, for the part `endpoint`")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # The part that this process runs.
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.smoke:
        options.tokens = 16
        options.clients = 2
        options.soak_seconds = min(options.soak_seconds, 12.0)
    if options.only:
        add_rows(options.out, options.only, run_part(options.only, options))
        return
    for part in options.parts.split(","):
        run_limited(part, sys.argv[1:], options.limit)
    print_table(read_rows(options.out))


if __name__ == "__main__":
    main()
