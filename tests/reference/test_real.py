"""The default target SmolLM2-135M-Instruct: lossless decoding, memory, time to load."""

import json
import os
import subprocess
import sys
import textwrap
from functools import partialmethod
from pathlib import Path

import jsonschema
import pytest
import torch

import peagle
from peagle.core import Method, Sampling
from peagle.grammar import Grammar
from peagle.loaded import LoadedPair
from peagle.reference import reference
from peagle.reference.decode import decode
from peagle.reference.proposer import proposer_for
from tests.support.engine.decoding import PATTERNS, Oracle, plain, tokens_of, transformers_generate
from tests.support.server.serving import tiny_pair

PROMPTS = (Path(__file__).parents[1] / "support" / "prompts.txt").read_text().splitlines()
K = 7
DRAFTED: tuple[Method, ...] = ("p-eagle", "eagle3")
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # another test worker uses the other core


def check_cached_decoders(real: LoadedPair, text: str, count: int) -> list[int]:
    """Check that transformers, plain decoding, adversarial drafters and both drafters agree."""
    target, ids = real.target, real.encode(text)
    target.tap(())
    expected = transformers_generate(target, ids, count)
    assert plain(target, ids, count) == expected
    for right in PATTERNS.values():
        assert (
            tokens_of(list(decode(target, Oracle(ids, expected, right), ids, K, count, Sampling())))
            == expected
        )
    for method in DRAFTED:
        drafter = real.drafter(method)
        target.tap(drafter.config.aux_layer_ids or ())
        assert (
            tokens_of(list(decode(target, proposer_for(drafter), ids, K, count, Sampling())))
            == expected
        )
    return expected


def check_cache_free_decoder(
    real: LoadedPair, text: str, method: Method, expected: list[int]
) -> None:
    drafter = real.drafter(method)
    real.target.tap(drafter.config.aux_layer_ids or ())
    steps = reference.decode(real.target, drafter, real.encode(text), K, len(expected), Sampling())
    assert tokens_of(steps)[: len(expected)] == expected


def test_lossless_short(real: LoadedPair) -> None:
    """`test_lossless_128` covers all prompts and longer answers."""
    expected = check_cached_decoders(real, PROMPTS[0], count=6)
    for method in DRAFTED:
        check_cache_free_decoder(real, PROMPTS[0], method, expected[:2])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_lossless_128(real: LoadedPair, number: int) -> None:
    """The reference takes minutes per prompt, so the two methods alternate."""
    expected = check_cached_decoders(real, PROMPTS[number], count=128)
    check_cache_free_decoder(real, PROMPTS[number], DRAFTED[number % 2], expected)


def test_the_tokenizer_is_complete(real: LoadedPair) -> None:
    """The GGUF file lacks some rules: split digits, the stop token, no clean-up of spaces."""
    tokenizer = real.target.tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("x = 2024")["input_ids"])[-4:] == [
        "2",
        "0",
        "2",
        "4",
    ]
    assert tokenizer.eos_token == "<|im_end|>"
    assert real.target.stop_ids == {2}
    text = "def f(x):\n    return x ** 2  # it 's 10 , isn 't it ?\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode(real.encode("hi")).startswith("<|im_start|>system")


def test_answers_make_sense(real: LoadedPair) -> None:
    answer = real.generate("What is the capital of France?", method="none", max_tokens=32)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_json_for_a_schema(real: LoadedPair) -> None:
    properties = {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    words, grammar = "Describe a person named Bob, 30 years old, as JSON.", Grammar.json(schema)
    answers = [
        real.generate(words, method=method, grammar=grammar) for method in ("none", *DRAFTED)
    ]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert all(answer.finish_reason == "stop" for answer in answers)
    jsonschema.validate(json.loads(answers[0].text), schema)
    assert all(answer.acceptance_length > 1.2 for answer in answers[1:]), (
        "drafts inside the grammar are accepted"
    )


@pytest.mark.slow
def test_memory_and_load_time() -> None:
    """A separate process measures peak memory of loading and decoding, and CPU time of loading."""
    script = """
        import json, time
        import torch
        from peagle.catalog import find_pair
        from peagle.pull import pull
        from peagle.target.transformers_import import quick_imports
        with quick_imports():  # As the commands do.
            from peagle.loaded import load
        from peagle.target import load_target
        answer = load(dtype="float32").generate("Hello!", k=7, max_tokens=8)
        # getrusage would include the peak of the parent process
        status = open("/proc/self/status").read()
        peak = int(status.split("VmHWM:")[1].split()[0]) / 2**20
        folder = pull(find_pair("smollm2-135m"))
        for _ in range(6):  # A busy machine makes some attempts slower.
            start = time.process_time()
            load_target(folder, torch.float32, "cpu")
            seconds = time.process_time() - start
            if seconds < 3:
                break
        print(json.dumps({"seconds": seconds, "gigabytes": peak, "tokens": len(answer.token_ids)}))
    """
    out = subprocess.check_output(
        [sys.executable, "-c", textwrap.dedent(script)], text=True, env=ONE_THREAD
    )
    measured = json.loads(out.splitlines()[-1])
    assert measured["gigabytes"] < 2
    assert measured["seconds"] < 3
    assert measured["tokens"] > 4


def readme_code() -> str:
    """The code of both Python examples in the README; the first has at most four lines."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    first, second = (block.split("```")[0] for block in readme.split("```python\n")[1:])
    assert len(first.strip().splitlines()) <= 4
    return first + second


def test_readme_runs_with_a_tiny_pair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The slow `test_readme_runs_with_the_default_pair` loads the pair that the README names."""
    monkeypatch.setattr(peagle, "load", lambda name: tiny_pair())
    monkeypatch.setattr(LoadedPair, "generate", partialmethod(LoadedPair.generate, max_tokens=16))
    exec(readme_code(), {})
    assert len(capsys.readouterr().out.split()) > 20


@pytest.mark.slow
def test_readme_runs_with_the_default_pair() -> None:
    out = subprocess.check_output([sys.executable, "-c", readme_code()], text=True, env=ONE_THREAD)
    assert len(out.split()) > 30


def test_weights_are_bf16_tied_and_complete(real: LoadedPair) -> None:
    weights = real.target.model.state_dict()
    assert real.target.model.config.tie_word_embeddings
    for name, tensor in weights.items():
        assert torch.equal(tensor, tensor.bfloat16().float()), name
        assert tensor.std() > 0, name
