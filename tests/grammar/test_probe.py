"""Grammars that compile forever, fill memory or overflow the stack do not affect their caller."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from peagle.errors import UserError
from peagle.grammar import Grammar, GrammarCompiler
from peagle.grammar.grammar import MAX_MULTIPLE
from peagle.grammar.probe import GrammarProbe, ProbeDied
from tests.support.grammar_bombs import PROBE_BOMBS, RULES
from tests.support.grammars import bound_pair


@pytest.fixture(scope="module")
def probe() -> Iterator[GrammarProbe]:
    with GrammarProbe(GrammarCompiler(bound_pair().target).vocabulary) as probe:
        yield probe


def children(pid: int | None) -> list[str]:
    """The child processes of a process."""
    command = ["ps", "--no-headers", "-o", "pid", "--ppid", str(pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def trial_seconds(probe: GrammarProbe) -> float:
    """CPU time of the finished trials."""
    fields = Path(f"/proc/{probe.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def until_idle(probe: GrammarProbe) -> None:
    end = time.monotonic() + 60
    while children(probe.pid):
        assert time.monotonic() < end, "a trial still runs"
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["rules", "references"])  # tests/abuse sends the other kinds.
def test_bombs_are_refused(probe: GrammarProbe, kind: str) -> None:
    grammar, reason = PROBE_BOMBS[kind]
    with pytest.raises(UserError, match=reason):
        probe.check(grammar)
    until_idle(probe)
    assert not probe.check(Grammar.regex("ab")).problem


def test_accepted_grammars_can_be_compiled(probe: GrammarProbe) -> None:
    compiler = GrammarCompiler(bound_pair().target)
    for grammar in (
        Grammar.json({"type": "integer", "multipleOf": MAX_MULTIPLE - 1}),
        Grammar.regex("[0-9]{3}"),
        Grammar.choice(["yes", "no"]),
    ):
        report = probe.check(grammar)
        compiled = compiler.compile_probed(grammar, grammar, report.memory_bytes)
        assert compiler.cached(grammar) is compiled
    rules = Grammar.ebnf('root ::= "ab" | "(" root ")"')
    report = probe.check(rules)
    assert "::=" not in report.lark and '"ab"' in report.lark
    compiled = compiler.compile_probed(rules, Grammar("lark", report.lark), 0)
    assert compiler.cached(Grammar.ebnf(rules.text)) is compiled


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar.regex("(a|b"), "unclosed"),
        (Grammar.ebnf("root ::= ("), "cannot be read"),
        (Grammar.choice(["<eos>"]), "'<eos>', which is a special token"),
        (Grammar.regex("\ud800"), "surrogates"),
    ],
)
def test_invalid_grammars_are_refused(probe: GrammarProbe, grammar: Grammar, word: str) -> None:
    with pytest.raises(UserError, match=word):
        probe.check(grammar)


def test_memory_is_measured(probe: GrammarProbe) -> None:
    small = probe.check(Grammar.regex("ab")).memory_bytes
    large = probe.check(Grammar.json({"enum": [f"{i:030d}" for i in range(6000)]})).memory_bytes
    assert small < 1 << 20 < large < 1 << 26


def test_a_canceled_trial_ends(probe: GrammarProbe) -> None:
    probe.check(Grammar.regex("ab"))
    assert probe.pid is not None
    before = trial_seconds(probe)
    os.kill(probe.pid, signal.SIGSTOP)  # The process then reads both messages at once.
    report = probe.submit(Grammar("lark", RULES))
    report.cancel()
    os.kill(probe.pid, signal.SIGCONT)
    probe.check(Grammar.regex("ab"))
    until_idle(probe)
    assert trial_seconds(probe) - before < 0.5  # The trial was stopped before its own time limit.
    with pytest.raises(CancelledError):
        report.result()


def test_a_killed_process_is_replaced(probe: GrammarProbe) -> None:
    probe.check(Grammar.regex("ab"))
    pid = probe.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # The trial must not end before the kill.
    report = probe.submit(Grammar("lark", RULES))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProbeDied):
        report.result(timeout=60)
    assert not probe.check(Grammar.regex("ab")).problem
    assert probe.pid not in (None, pid)


def test_close_ends_process_and_threads() -> None:
    before = threading.active_count()
    probe = GrammarProbe(GrammarCompiler(bound_pair().target).vocabulary)
    reports = [probe.submit(Grammar("lark", RULES)) for _ in range(3)]
    pid = probe.pid
    probe.close()
    for report in reports:
        with pytest.raises(ProbeDied):  # A finished trial would have a result.
            report.result(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)
    with pytest.raises(ProbeDied):
        probe.submit(Grammar.regex("ab"))
    end = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.02)
    assert threading.active_count() <= before


def test_the_process_ends_with_its_parent() -> None:
    """The process ends even if the parent is killed while a trial runs."""
    program = """
import os, sys, time
from peagle.grammar import Grammar, GrammarCompiler
from peagle.grammar.matcher import Vocabulary
from peagle.grammar.probe import GrammarProbe
probe = GrammarProbe(Vocabulary.from_json(sys.stdin.read()))
probe.submit(Grammar("lark", sys.argv[1]))
print(probe.pid, "torch" in sys.modules, flush=True)
time.sleep(60)
"""
    vocabulary = GrammarCompiler(bound_pair().target).vocabulary.to_json()
    parent = subprocess.Popen(
        [sys.executable, "-c", program, RULES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None and parent.stdout is not None
    with parent.stdin:
        parent.stdin.write(vocabulary)
    pid, torch = parent.stdout.readline().split()
    assert torch == "False", "the probe must not import torch"
    parent.kill()
    parent.wait()
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("value", [1, 0.01, 25, 2_500_000, 1e9, MAX_MULTIPLE, 0.0025])
def test_small_multiples_are_accepted(value: float) -> None:
    Grammar.json({"type": "number", "multipleOf": value}).check()


@pytest.mark.parametrize("value", [10_000_019, MAX_MULTIPLE + 1, 0.10001, 2**23, 10**400 + 7])
def test_large_multiples_are_refused(value: float) -> None:
    schemas = ({"multipleOf": value}, {"properties": {"a": {"anyOf": [{"multipleOf": value}]}}})
    for schema in schemas:
        with pytest.raises(UserError, match=r"multipleOf .* use at most 10,000"):
            Grammar.json(schema).check()


def test_property_names_and_constants_are_not_checked_as_multiples() -> None:
    for schema in (
        {"properties": {"multipleOf": {"type": "integer"}}},
        {"enum": [{"multipleOf": 10_000_019}]},
        {"const": {"multipleOf": 10_000_019}},
        {"multipleOf": "10000019"},
    ):
        Grammar.json(schema).check()
    Grammar.json('{"multipleOf": 1').check()


def test_live_memory_is_limited() -> None:
    """Grammars in use by requests count towards the limit, even if the cache has evicted them."""
    compiler = GrammarCompiler(bound_pair().target, cache_bytes=100)
    grammars = [Grammar.regex(text) for text in ("a", "b", "c")]
    held = [compiler.compile_probed(grammar, grammar, 60) for grammar in grammars]
    assert compiler.cached(grammars[0]) is None and compiler.cached(grammars[2]) is held[2]
    assert compiler.live_bytes == 180
    assert not compiler.make_room(60, limit_bytes=200)
    del held[0]
    assert compiler.make_room(60, limit_bytes=200)
