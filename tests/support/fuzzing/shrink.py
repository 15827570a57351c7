"""Shrinks a failing case: removes requests and options while the case still fails."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.support.fuzzing.case import FuzzCase, FuzzRequest

# Simpler values, the simplest first; absent options stay absent.
SIMPLER: dict[str, tuple[Any, ...]] = {
    "method": ("none",),
    "k": (1, 2, 3),
    "max_batch": (1, 2),
    "prefix_caching": (False,),
    "kv_tokens": (400,),
    "prefill_chunk": (512,),
    "page_size": (16, 4),
}


def shrink(case: FuzzCase, fails: Callable[[FuzzCase], bool], seconds: float = 60.0) -> FuzzCase:
    """The smallest failing case found within the time limit."""
    deadline = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler_cases(case):
            if time.monotonic() > deadline:
                return case
            if fails(candidate):
                case = candidate
                smaller = True
                break
    return case


def simpler_cases(case: FuzzCase) -> Iterator[FuzzCase]:
    """Cases with fewer requests or options, the largest reductions first."""
    count = len(case.requests)
    half = count // 2
    if half:
        yield replace(case, requests=case.requests[:half])
        yield replace(case, requests=case.requests[half:])
    for index in range(count if count > 1 else 0):
        yield replace(case, requests=case.requests[:index] + case.requests[index + 1 :])
    yield from simpler_engines(case)
    for index, request in enumerate(case.requests):
        for other in simpler_requests(request):
            requests = (*case.requests[:index], other, *case.requests[index + 1 :])
            yield replace(case, requests=requests)


def simpler_engines(case: FuzzCase) -> Iterator[FuzzCase]:
    for name in ("lookahead", "shape_seed", "draft_seed"):
        default = 0 if name == "lookahead" else None
        if getattr(case, name) != default and (name != "shape_seed" or case.engine["k"] != "auto"):
            yield replace(case, **{name: default})  # type: ignore[arg-type]
    for name in ("tree", "context", "exact"):
        if name in case.engine:
            engine = {key: value for key, value in case.engine.items() if key != name}
            yield replace(case, engine=engine)
    for name, values in SIMPLER.items():
        current = case.engine.get(name)
        better = values[: values.index(current)] if current in values else values
        for value in better if name in case.engine else ():
            yield replace(case, engine=case.engine | {name: value})


def simpler_requests(request: FuzzRequest) -> Iterator[FuzzRequest]:
    if request.abort_after is not None:
        yield replace(request, abort_after=None)
    if request.abort_at_piece is not None:
        yield replace(request, abort_at_piece=None)
    if request.arrival:
        yield replace(request, arrival=0)
    for name in request.options:
        if name != "max_tokens":
            options = {key: value for key, value in request.options.items() if key != name}
            yield replace(request, options=options)
    if len(request.prompt) > 1:
        yield replace(request, prompt=request.prompt[: len(request.prompt) // 2])
        yield replace(request, prompt=request.prompt[:-1])
    tokens = request.options.get("max_tokens", 0)
    for shorter in (tokens // 2, tokens - 1):
        if shorter >= max(1, request.options.get("min_tokens", 0)):
            yield replace(request, options=request.options | {"max_tokens": shorter})
