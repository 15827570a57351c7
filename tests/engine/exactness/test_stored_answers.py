"""The default pair with stored GGUF weights: neither drafts nor other requests change a token."""

import pytest
import torch

from peagle.core import DRAFTER_METHODS, Method
from peagle.kernels.cpu.level import NATIVE, CpuLevel
from tests.support.engine.decoding import plain
from tests.support.engine.stored_answers import (
    PROMPTS,
    check_answers,
    check_in_process,
    stored_file,
    stored_pair,
)
from tests.support.kernels.cpu_features import LEVELS, needs_c

pytestmark = needs_c


@pytest.fixture(autouse=True)
def stored_weights() -> None:
    if not stored_file().is_file():
        pytest.skip("the GGUF file could not be fetched")


def check(level: CpuLevel, count: int, tokens: int, int8: bool = False) -> None:
    if level == NATIVE:
        check_answers(count, tokens, int8)
    else:
        check_in_process(level.name, count, tokens, int8)


@pytest.mark.slow
def test_two_requests() -> None:
    """`test_64_requests` does the same at every level."""
    check(NATIVE, 2, 4)


@pytest.mark.parametrize(
    ("methods", "tokens"),
    [
        pytest.param(("p-eagle",), 4, id="p-eagle"),
        pytest.param(("none", *DRAFTER_METHODS), 8, marks=pytest.mark.slow, id="all"),
    ],
)
def test_the_modules_of_transformers(methods: tuple[Method, ...], tokens: int) -> None:
    """Answers of the engine equal those of the transformers modules."""
    pair = stored_pair()
    ids = pair.encode(PROMPTS[0])
    expected = plain(pair.target, ids, tokens)
    for method in methods:
        answer = pair.generate(ids, method=method, max_tokens=tokens)
        assert answer.token_ids == expected
        assert answer.weights.startswith("Q4_1") and answer.dtype == "float32"


def test_int8() -> None:
    """Rows are quantized independently, so drafts change no token in int8, either."""
    check(NATIVE, 2, 4, int8=True)


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_64_requests(level: CpuLevel, int8: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(level, 64, 8 if int8 else 16, int8)
    finally:
        torch.set_num_threads(threads)
