"""The speed of `peagle serve` of two source trees, which take turns on this machine.

    git worktree add ../before 5ffa55f
    python -m benchmarks.server.compare ../before . [--streams 1,8,64] [--rounds 3]
        [--pair smollm2-135m] [--tokens 64] [--requests 2] [-- OPTIONS OF SERVE]

Every round starts a server of each tree, in turn, and measures all numbers of streams: streamed
greedy answers of `--tokens` tokens each, `--requests` for each stream. The medians of the rounds
count. `--pair tiny` is the pair of the tests. The machine must be quiet.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from benchmarks.server.process import serving
from benchmarks.server.soak import PROMPTS, pair_arguments
from benchmarks.server.stream_load import LoadResult, drive, request_body

Results = dict[tuple[int, int], list[LoadResult]]  # by tree and streams


def measure(options: argparse.Namespace, arguments: list[str]) -> Results:
    results: Results = defaultdict(list)
    for number in range(options.rounds):
        trees = list(enumerate(options.trees))
        for tree, root in trees if number % 2 == 0 else reversed(trees):
            with serving([*arguments, *options.serve], root.resolve()) as server:
                drive(server.url, bodies(4, options.tokens), 2, 1)  # The first steps are slower.
                for streams in options.streams:
                    count = streams * options.requests + 4
                    result = drive(server.url, bodies(count, options.tokens), streams, 1)
                    results[tree, streams].append(result)
                    print(line(root, streams, [result]), flush=True)
    return results


def bodies(count: int, tokens: int) -> list[dict[str, object]]:
    texts = [f"{PROMPTS[i % len(PROMPTS)]} ({i})" for i in range(count)]
    return [request_body(text, tokens) for text in texts]


def line(root: Path, streams: int, results: list[LoadResult]) -> str:
    return json.dumps(
        {
            "tree": str(root),
            "streams": streams,
            "tokens_per_second": round(speed(results), 1),
            "ttft_p50_ms": round(statistics.median(r.first_token_ms(0.5) for r in results), 1),
            "ttft_p99_ms": round(statistics.median(r.first_token_ms(0.99) for r in results), 1),
            "errors": sum(sum(r.errors.values()) for r in results),
        }
    )


def speed(results: list[LoadResult]) -> float:
    return statistics.median(result.tokens_per_second for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", type=Path, nargs=2)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--streams", default="1,8,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("serve", nargs="*", help="options of `peagle serve`, after --")
    options = parser.parse_args()
    options.streams = [int(word) for word in options.streams.split(",")]
    with pair_arguments(options.pair) as arguments:
        results = measure(options, arguments)
    print("medians:")
    for streams in options.streams:
        before, after = (results[tree, streams] for tree in range(2))
        for root, runs in zip(options.trees, (before, after), strict=True):
            print(line(root, streams, runs))
        print(f"{streams} streams: second / first = {speed(after) / speed(before):.3f}")


if __name__ == "__main__":
    main()
