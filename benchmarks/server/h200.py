"""All bars of the server on a GPU, in one run: `peagle serve` beside its engine in process.

    python -m benchmarks.server.h200 --out $OUT/serve.json --data FOLDER [--vllm FOLDER]
        [--parts ready,pair,vllm,shape,soak] [--http-workers N] [--clients 4] [--seconds 560]
    python -m benchmarks.server.h200 --endpoint http://127.0.0.1:8000 --parts endpoint
    python -m benchmarks.server.h200 --smoke            # the tiny pair on a CPU, some minutes

Parts, each in processes of its own that end after its limit:

    ready      seconds until /health is 200 without compiled kernels, and its phases; the same until
               `generate` has answered, and once more with what it has kept. Python's bytecode is
               compiled before, as pip does when it installs packages (bytecode.py)
    pair       the default pair, ready with the cache of `ready`; engine in process, then streamed,
               at 1, 8, 64 and 256 streams, once all CUDA graphs are captured
    vllm       the load of `pair` at 1 and 64 streams on vLLM's server with the exported drafter
    shape      random weights in the shape of an 8B model, prompts of token ids, at 1, 8 and 64
    soak       server/soak.py: 200 streams for what is left of `--seconds` (at most 300 s), the
               engine killed once
    endpoint   the load of `vllm` on a server that runs already

Every row is printed and added to `--out` at once, so that parts may run in several calls; the table
at the end shows all of them. The logs of servers are kept beside it.
`--data`: the folder with humaneval.jsonl; without it there are three short prompts.
`--vllm`: a folder for PYTHONPATH with vLLM and its web server; without it the part is left out.

The machine needs the packages of `peagle[serve]`. Where they cannot be installed, carry them:

    pip install --target serve_packages --no-deps fastapi starlette pydantic pydantic_core \\
        annotated_types annotated_doc typing_inspection uvicorn h11 httptools uvloop click anyio \\
        sniffio idna prometheus_client llguidance msgspec pyzmq gguf opentelemetry-api
    PYTHONPATH=.:serve_packages python -m benchmarks.server.h200 ...

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
from shutil import disk_usage, rmtree
from typing import Any

from benchmarks.server.bytecode import bytecode_variables, compile_bytecode
from benchmarks.server.process import ROOT, ServerProcess, cpu_seconds, process_roles, serving
from benchmarks.server.soak import PROMPTS, TINY_OPTIONS
from benchmarks.server.stream_load import Body, LoadResult, drive, request_body
from benchmarks.vllm.server import VllmLaunch, serving_vllm

PARTS = ("ready", "pair", "vllm", "shape", "soak")
LIMITS = {"ready": 130.0, "pair": 130.0, "vllm": 150.0, "shape": 200.0, "endpoint": 120.0}
DEFAULT_PAIR = "smollm2-135m"
# By streams: the share of the engine in process that the server must reach.
PAIR_BARS = {1: 0.95, 8: 0.90, 64: 0.80, 256: 0.70}
SHAPE_BARS = {1: 0.97, 8: 0.97, 64: 0.97}
TTFT_BAR_MS = 60.0  # At 64 streams, p99.
READY_BARS = {"fresh": 40.0, "warm": 15.0, "generate fresh": 15.0, "generate warm": 15.0}
SHAPE_READY_BAR = 60.0
VLLM_BAR = 3.0  # Ours over vLLM's server, at 1 and 64 streams.
VLLM_K = 5
MAX_SOAK_SECONDS = 300.0
SOAK_RESERVE_SECONDS = 100.0  # What other parts leave to the soak.
SOAK_START_SECONDS = 45.0  # Of the soak's own processes, before and after the load.
SHAPE_BYTES = 24 << 30  # Disk space of the pair in the shape of an 8B model.
SHAPE_PROMPT_TOKENS = 128
PROMPT_COUNT = 64
REQUESTS = {1: 24, 8: 128, 64: 512}  # By streams.
WARM_UP_TOKENS = 32  # Of the requests before each level, twice as many as streams.
SHAPE_REQUESTS = {1: 8, 8: 48, 64: 256}
REQUESTS_PER_STREAM = 4


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
    with tempfile.TemporaryDirectory(dir=None if options.smoke else large_folder()) as name:
        folder = Path(name)
        extra: dict[str, Any] = {"k": 5}
        words = ["-k", "5"]
        if options.smoke:
            from tests.support.server.serving import tiny_folder

            tiny_folder(folder)
            words = list(TINY_OPTIONS)
            extra = {"dtype": "float32", "device": "cpu", "kv_tokens": 65536, "k": 3}
        else:
            write_shape(folder)
        target = str(folder / "target")
        drafter = str(folder / "p-eagle")
        settings = {"pair": target, "drafter": drafter, **extra}
        yield ServedPair([target, "--drafter", drafter, *words], settings)


def large_folder() -> str | None:
    """Memory is faster than a disk, where there is enough of it."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and disk_usage(memory).free > SHAPE_BYTES else None


def write_shape(folder: Path) -> None:
    """In a process of its own, which gives its GPU memory back."""
    from peagle.catalog.catalog import find_pair
    from peagle.pull.pull import target_folder

    tokenizer = str(target_folder(find_pair(DEFAULT_PAIR)))
    command = [sys.executable, "-m", "benchmarks.server.shaped_pair", str(folder), tokenizer]
    subprocess.run(command, check=True, cwd=ROOT)


def read_prompts(data: Path | None) -> list[str]:
    if data is None:
        return list(PROMPTS)
    lines = (data / "humaneval.jsonl").read_text().splitlines()
    return [str(json.loads(line)["prompt"]) for line in lines[:PROMPT_COUNT]]


def id_prompts() -> list[list[int]]:
    return [[5 + (7 * i + j) % 80 for j in range(SHAPE_PROMPT_TOKENS)] for i in range(PROMPT_COUNT)]


# --- the parts ------------------------------------------------------------------------------------


def measure_ready(options: argparse.Namespace) -> Iterator[Row]:
    rmtree(triton_cache(), ignore_errors=True)
    if not options.smoke:
        compile_bytecode()
    with pair_of("ready", options) as pair:
        with serving_part("ready", pair.arguments, options) as server:
            yield at_most("ready", "fresh", server.ready_seconds, READY_BARS["fresh"])
            yield from startup_rows("ready", server)
        if options.smoke:
            return
        with tempfile.TemporaryDirectory() as kernels:
            for name in ("generate fresh", "generate warm"):
                yield from generate_rows(name, pair.arguments[0], kernels)


def generate_rows(name: str, pair: str, kernels: str) -> Iterator[Row]:
    """Seconds until `peagle generate` has answered, and their phases; `kernels`: Triton's cache."""
    command = [sys.executable, "-m", "peagle", "generate", pair, PROMPTS[0], "--json"]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--max-tokens", "16"],
        check=True,
        cwd=ROOT,
        env={**os.environ, **bytecode_variables(), "TRITON_CACHE_DIR": kernels},
        stdout=subprocess.PIPE,
    )
    seconds = time.perf_counter() - started
    yield at_most("ready", name, seconds, READY_BARS[name])
    answer = json.loads(done.stdout.splitlines()[-1])
    phases = dict(answer["startup"])
    phases["first token"] = answer["prefill_seconds"]  # With the capture of its graphs.
    phases["other tokens"] = answer["seconds"] - answer["prefill_seconds"]
    phases["start and end"] = seconds - sum(phases.values())
    for phase, part in phases.items():
        yield Row("ready", f"{name}: of it {phase}", round(part, 2))


def startup_rows(part: str, server: ServerProcess) -> Iterator[Row]:
    for engine in server.engines():
        for phase, seconds in engine.get("startup", {}).items():
            yield Row(part, f"of it {phase}", seconds)


def triton_cache() -> Path:
    return Path(tempfile.gettempdir()) / "serve-h200-triton"


@contextmanager
def serving_part(
    part: str, arguments: Sequence[str], options: argparse.Namespace
) -> Iterator[ServerProcess]:
    """`peagle serve` with the Triton cache of all parts; its log lies beside the results."""
    environment = {"TRITON_CACHE_DIR": str(triton_cache())}
    if not options.smoke:
        environment |= bytecode_variables()
    log = options.out.with_suffix(f".{part}.log")
    with serving(arguments, environment=environment, log=log) as server:
        yield server


def measure_speed(part: str, options: argparse.Namespace) -> Iterator[Row]:
    """The engine in process, then the server, at every number of streams."""
    bars = PAIR_BARS if part == "pair" else SHAPE_BARS
    levels = level_sizes(list(bars))
    if part == "shape":
        levels = list(SHAPE_REQUESTS.items())
    if options.smoke:
        levels = [(1, 4), (4, 12)]
    prompts: Sequence[str | list[int]] = read_prompts(options.data)
    if part == "shape":
        prompts = id_prompts()
    with pair_of(part, options) as pair:
        workers = ["--http-workers", str(options.http_workers)] if options.http_workers else []
        with serving_part(part, [*pair.arguments, *workers], options) as server:
            bar = SHAPE_READY_BAR if part == "shape" else READY_BARS["warm"]
            yield at_most(part, "ready", server.ready_seconds, bar)
            yield from startup_rows(part, server)
            imports = None
            if part == "pair" and not options.smoke:  # While the server is busy with graphs.
                imports = subprocess.Popen([sys.executable, "-m", "benchmarks.server.import_times"])
            yield Row(part, "all graphs after", round(server.wait_for_graphs(), 1))
            if imports is not None:
                imports.wait()
            served = {}
            for streams, level in serve_levels(server, prompts, levels, options):
                served[streams] = level
                yield from level_rows(part, streams, level)
        engine = engine_speeds(pair, prompts, options, levels)
    for streams, level in served.items():
        yield from speed_rows(part, streams, engine[streams], level, bars.get(streams, 0.0))


@dataclass(frozen=True, slots=True)
class ServedLevel:
    """The load of one number of streams, and what the server's processes spent on it."""

    result: LoadResult
    cpu: dict[str, list[float]]  # CPU seconds by the part of a process in the server

    @property
    def seconds(self) -> float:
        return self.result.end - self.result.start


def serve_levels(
    server: ServerProcess,
    prompts: Sequence[str | list[int]],
    levels: list[tuple[int, int]],
    options: argparse.Namespace,
) -> Iterator[tuple[int, ServedLevel]]:
    roles = process_roles(server.pid)
    for streams, count in levels:
        # The first requests of a level capture graphs of prefills that no level had before.
        drive(server.url, make_bodies(prompts, 2 * streams, WARM_UP_TOKENS), streams, 1)
        bodies = make_bodies(prompts, count, options.tokens)
        before = {pid: cpu_seconds(pid) for pid in roles}
        result = drive(server.url, bodies, streams, options.clients)
        cpu: dict[str, list[float]] = {}
        for pid, role in roles.items():
            cpu.setdefault(role, []).append(cpu_seconds(pid) - before[pid])
        yield streams, ServedLevel(result, cpu)


def level_rows(part: str, streams: int, level: ServedLevel) -> Iterator[Row]:
    """Where the time of a level went: its requests, and the load of processes in cores."""
    name = f"{streams} streams"
    result = level.result
    yield Row(part, f"{name}: server tokens/s", round(result.tokens_per_second, 1))
    yield Row(part, f"{name}: seconds", round(level.seconds, 2))
    yield Row(part, f"{name}: TTFT p50 ms", round(result.first_token_ms(0.5), 1))
    yield Row(part, f"{name}: answer p50 ms", round(result.answer_ms(0.5), 1))
    for role, seconds in sorted(level.cpu.items()):
        loads = sorted((second / level.seconds for second in seconds), reverse=True)
        text = " ".join(f"{load:.2f}" for load in loads)
        yield Row(part, f"{name}: {role} cores", round(sum(loads), 2), text)
    clients = result.cpu_seconds / level.seconds
    yield Row(part, f"{name}: client cores", round(clients, 2))
    us_per_token = 1e6 * sum(level.cpu.get("front", [])) / max(result.tokens, 1)
    yield Row(part, f"{name}: front us/token", round(us_per_token, 2))
    for error, count in result.errors.items():
        print(f"{name}: {count} x {error}", flush=True)


def speed_rows(
    part: str, streams: int, engine: dict[str, float], level: ServedLevel, bar: float
) -> list[Row]:
    name = f"{streams} streams"
    result = level.result
    speed = engine["tokens_per_second"]
    p99 = result.first_token_ms(0.99)
    ttft = Row(part, f"{name}: TTFT p99 ms", round(p99, 1))
    if part == "pair" and streams == 64:
        ttft = at_most(part, ttft.name, p99, TTFT_BAR_MS)
    return [
        Row(part, f"{name}: engine tokens/s", speed),
        Row(part, f"{name}: engine TTFT p50 ms", engine["ttft_p50_ms"]),
        Row(part, f"{name}: engine TTFT p99 ms", engine["ttft_p99_ms"]),
        at_least(part, f"{name}: server / engine", result.tokens_per_second / speed, bar),
        ttft,
        at_most(part, f"{name}: errors", sum(result.errors.values()), 0),
    ]


def level_sizes(streams: list[int]) -> list[tuple[int, int]]:
    """With the number of requests at each: about two seconds of an H200 with the default pair."""
    return [(n, REQUESTS.get(n, REQUESTS_PER_STREAM * n)) for n in streams]


def make_bodies(prompts: Sequence[str | list[int]], count: int, tokens: int) -> list[Body]:
    return [request_body(prompts[i % len(prompts)], tokens) for i in range(count)]


def engine_speeds(
    pair: ServedPair,
    prompts: Sequence[str | list[int]],
    options: argparse.Namespace,
    levels: list[tuple[int, int]],
) -> dict[int, dict[str, float]]:
    job = {"settings": pair.settings, "prompts": prompts, "tokens": options.tokens}
    job["warm_up_tokens"] = WARM_UP_TOKENS
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine.load"],
        input=json.dumps({**job, "levels": levels}).encode(),
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(triton_cache())},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    print(json.dumps(lines[0]), flush=True)
    return {line["streams"]: line for line in lines if "streams" in line}


def measure_soak(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.server.soak import soak

    load = argparse.Namespace(streams=200, seconds=options.soak_seconds, tokens=64, idle=0)
    load.kill = True
    if options.smoke:
        load.streams = 12
    words = ["--kv-tokens", str(options.kv_tokens)] if options.kv_tokens else []
    with (
        pair_of("soak", options) as pair,
        serving_part("soak", [*pair.arguments, *words], options) as server,
    ):
        passed = asyncio.run(soak(server, load))
    name = f"{load.streams} streams, {load.seconds:.0f} s"
    yield Row("soak", name, float(passed), "1", passed)


def measure_endpoint(part: str, url: str, options: argparse.Namespace) -> Iterator[Row]:
    prompts = read_prompts(options.data)
    ours = {row.name: row.value for row in read_rows(options.out) if row.part == "pair"}
    drive(url, make_bodies(prompts, 8, 16), 4, 1)
    for streams, count in level_sizes([1, 64]):
        bodies = make_bodies(prompts, count, options.tokens)
        result = drive(url, bodies, streams, options.clients)
        speed = round(result.tokens_per_second, 1)
        yield Row(part, f"{streams} streams: tokens/s", speed)
        yield Row(part, f"{streams} streams: TTFT p99 ms", round(result.first_token_ms(0.99), 1))
        mine = ours.get(f"{streams} streams: server tokens/s")
        if mine and speed:
            yield at_least(part, f"{streams} streams: ours / this", mine / speed, VLLM_BAR)


def measure_vllm(options: argparse.Namespace) -> Iterator[Row]:
    from peagle.catalog.catalog import find_pair
    from peagle.pull.pull import target_folder

    if options.vllm is None:
        print("vllm: left out, because --vllm is not given")
        return
    with tempfile.TemporaryDirectory() as name:
        drafter = Path(name) / "drafter"
        command = [sys.executable, "-m", "peagle", "export", options.pair, str(drafter)]
        subprocess.run(command, check=True, cwd=ROOT)
        target = target_folder(find_pair(options.pair))
        log = options.out.with_suffix(".vllm.log")
        launch = VllmLaunch(options.vllm, target, drafter, VLLM_K, max(PAIR_BARS))
        with serving_vllm(launch, log) as (url, seconds):
            yield Row("vllm", "ready", round(seconds, 1))
            yield from measure_endpoint("vllm", url, options)


def measure(part: str, options: argparse.Namespace) -> Iterator[Row]:
    if part == "ready":
        return measure_ready(options)
    if part == "soak":
        return measure_soak(options)
    if part == "vllm":
        return measure_vllm(options)
    if part == "endpoint":
        return measure_endpoint(part, options.endpoint, options)
    return measure_speed(part, options)


# --- one process for each part --------------------------------------------------------------------


def run_limited(part: str, arguments: list[str], limit: float) -> None:
    """Run one part in a process of its own; end it and its servers after `limit` seconds."""
    command = [sys.executable, "-m", "benchmarks.server.h200", *arguments, "--only", part]
    print(f"--- {part}, at most {limit:.0f} s", flush=True)
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


def write_rows(out: Path, rows: list[Row]) -> None:
    fields = [{name: getattr(row, name) for name in Row.__slots__} for row in rows]
    out.write_text(json.dumps(fields, indent=1))


def run_part(part: str, options: argparse.Namespace) -> None:
    """Replace the results of a part, row by row."""
    rows = [row for row in read_rows(options.out) if row.part != part]
    for row in measure(part, options):
        print_table([row])
        rows.append(row)
        write_rows(options.out, rows)


def print_table(rows: list[Row]) -> None:
    for row in rows:
        verdict = {None: "", True: "passed", False: "FAILED"}[row.passed]
        line = f"{row.part:9} {row.name:32} {row.value:>12,} {row.bar:>9} {verdict}"
        print(line.rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("serve_h200.json"))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--pair", default=DEFAULT_PAIR)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--http-workers", type=int, help="default: that of `peagle serve`")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--kv-tokens", type=int, help="of the soak, beside other work on the GPU")
    parser.add_argument("--soak-seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=560.0, help="of all parts together")
    parser.add_argument("--vllm", type=Path, help="folder with vLLM, for the part `vllm`")
    parser.add_argument("--endpoint", help="the URL of another server, for the part `endpoint`")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # The part that this process runs.
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        options.tokens = 16
        options.clients = 2
    if options.only:
        run_part(options.only, options)
        return
    end = time.monotonic() + options.seconds
    parts = options.parts.split(",")
    for part in parts:
        left = end - time.monotonic()
        if part != "soak" and "soak" in parts:
            left = max(left - SOAK_RESERVE_SECONDS, 1.0)
        soak_seconds = min(left - SOAK_START_SECONDS, MAX_SOAK_SECONDS)
        soak_seconds = 12.0 if options.smoke else max(soak_seconds, 30.0)
        arguments = [*sys.argv[1:], "--soak-seconds", str(soak_seconds)]
        run_limited(part, arguments, min(left, LIMITS.get(part, left)))
    print_table(read_rows(options.out))


if __name__ == "__main__":
    main()
