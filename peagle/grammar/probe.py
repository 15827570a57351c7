"""GrammarProbe: tries grammars in another process, where they can do no harm.

A grammar of a hundred characters can keep llguidance busy for ever, fill the memory, or overflow
the stack, and none of that can be stopped inside a process. Compiled grammars cannot be sent
between processes, so what the probe accepts is compiled once more by GrammarCompiler, at a cost
that is known by then.
"""

import itertools
import json
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from peagle.errors import UserError
from peagle.grammar.grammar import Grammar
from peagle.grammar.matcher import Vocabulary
from peagle.grammar.probe_report import ProbeReport

PACKAGE_FOLDER = Path(__file__).parents[2]
# The process must import the same package, wherever this one found it.
PROGRAM = """
import sys
if sys.argv[1] not in sys.path:
    sys.path.insert(0, sys.argv[1])
from peagle.grammar.probe_process import main
main()
"""
STOP_SECONDS = 2.0


class ProbeDied(Exception):
    """The process of the probe ended; the next grammar starts a new one."""


@dataclass(slots=True, eq=False)
class ProbeProcess:
    popen: "subprocess.Popen[bytes]"
    reports: dict[int, "Future[ProbeReport]"] = field(default_factory=dict)
    ended: bool = False  # It is not used any more.
    input_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def input(self) -> IO[bytes]:
        assert self.popen.stdin is not None
        return self.popen.stdin

    @property
    def output(self) -> IO[bytes]:
        assert self.popen.stdout is not None
        return self.popen.stdout

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            with self.input_lock:
                self.input.write(data)
                self.input.flush()
        except (OSError, ValueError) as error:  # ValueError: the input was closed.
            self.ended = True
            raise ProbeDied("the grammar process ended") from error

    def cancel(self, id: int) -> None:
        with suppress(ProbeDied):
            if self.reports.pop(id, None) is not None and not self.ended:
                self.send({"cancel": id})


class GrammarProbe:
    """Starts its process with the first grammar. All methods are thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()  # of starting and stopping the process
        self._process: ProbeProcess | None = None
        self._ids = itertools.count()
        self._closed = False

    def submit(self, grammar: Grammar) -> "Future[ProbeReport]":
        """Try a grammar. Canceling the future ends the trial; ProbeDied: try again.

        The first call starts the process, which takes about a second.
        """
        report: Future[ProbeReport] = Future()
        with self._lock:
            process = self._running()
        id = next(self._ids)
        process.reports[id] = report
        process.send({"id": id, "kind": grammar.kind, "text": grammar.text})
        report.add_done_callback(lambda done: process.cancel(id) if done.cancelled() else None)
        return report

    def check(self, grammar: Grammar) -> ProbeReport:
        """Try a grammar and wait for the result; UserError: it cannot be used."""
        grammar.check()
        report = self.submit(grammar).result()
        if report.problem:
            raise UserError(report.problem)
        return report

    def close(self) -> None:
        """End the process and all trials."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                stop(self._process)

    def __enter__(self) -> "GrammarProbe":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The id of the process; None: it does not run."""
        process = self._process
        return None if process is None or process.ended else process.popen.pid

    def _running(self) -> ProbeProcess:
        if self._closed:
            raise ProbeDied("the grammar process was closed")
        if self._process is None or self._process.ended:
            self._process = start(self.vocabulary)
        return self._process


def start(vocabulary: Vocabulary) -> ProbeProcess:
    """Start a process; UserError: the vocabulary cannot be used with grammars."""
    popen = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(PACKAGE_FOLDER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process = ProbeProcess(popen)
    try:
        process.input.write(vocabulary.to_json().encode() + b"\n")
        process.input.flush()
        answer = process.output.readline()
    except OSError:
        answer = b""
    if not answer:
        stop(process)
        raise ProbeDied("the grammar process did not start")
    if problem := json.loads(answer)["problem"]:
        stop(process)
        raise UserError(problem)
    reader = threading.Thread(target=read_reports, args=(process,), daemon=True)
    reader.name = "peagle-grammar-reports"
    reader.start()
    return process


def read_reports(process: ProbeProcess) -> None:
    """Hand reports to their futures until the process ends. This runs on a thread."""
    for line in process.output:
        fields = json.loads(line)
        report = process.reports.pop(fields.pop("id"), None)
        if report is not None and report.set_running_or_notify_cancel():
            report.set_result(ProbeReport(**fields))
    process.ended = True
    process.popen.wait()
    while process.reports:
        _, report = process.reports.popitem()
        if report.set_running_or_notify_cancel():
            report.set_exception(ProbeDied("the grammar process ended"))


def stop(process: ProbeProcess) -> None:
    process.ended = True
    with suppress(OSError), process.input_lock:  # Unsent requests do not matter any more.
        process.input.close()
    try:
        process.popen.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.popen.kill()
        process.popen.wait()
