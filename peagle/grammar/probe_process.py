"""The process of a GrammarProbe, which starts it and calls `main`.

It reads a vocabulary from standard input once, and then compiles every grammar in a forked child of
its own, which has limits of time, memory and stack. So no grammar can harm this process, and the
next one does not wait until the vocabulary is read again. Lines of JSON:

    <- the vocabulary                                   -> {"problem"}: "", or why it cannot be used
    <- {"id", "kind", "text"}: try a grammar            -> {"id", ...}: the fields of ProbeReport
    <- {"cancel": id}

The process has one thread, which makes forking safe, and never imports torch. It ends with its
standard input, that is with its parent.
"""

import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError
from peagle.grammar.grammar import Grammar
from peagle.grammar.matcher import Vocabulary, build_matcher, lark_of, try_answer
from peagle.grammar.probe_report import CPU_SECONDS, MEMORY_BYTES, ProbeReport

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Nested rules and references are compiled recursively, and a stack overflow ends the process. The
# threads of the server, which compile the same after the probe, have at least twice as much.
STACK_BYTES = 1 << 20
READ_BYTES = 1 << 16
STATM = Path("/proc/self/statm")
# Compiled once before the first fork, so that its cost is not measured again for every grammar.
WARM_UP = (Grammar.json({"type": "integer"}), Grammar.regex("a+"), Grammar.ebnf('root ::= "a"'))
DEATHS = {
    signal.SIGXCPU: f"it takes more than {CPU_SECONDS} seconds to compile: make it smaller",
    signal.SIGABRT: f"it takes more than {MEMORY_BYTES >> 20} MB of memory: make it smaller",
    signal.SIGSEGV: "its rules or references are nested too deeply: use fewer levels",
}
DEATHS[signal.SIGKILL] = DEATHS[signal.SIGXCPU]
DEATHS[signal.SIGBUS] = DEATHS[signal.SIGSEGV]


@dataclass(slots=True, eq=False)
class Child:
    id: int
    pid: int
    pipe: int  # Its report arrives here.
    report: bytearray = field(default_factory=bytearray)


class ProbeServer:
    def __init__(self, vocabulary: Vocabulary, tokenizer: "LLTokenizer") -> None:
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, Child] = {}  # by id
        self.input = bytearray()

    def run(self) -> None:
        """Serve until standard input ends."""
        self.selector.register(0, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self.selector.select():
                    if key.data is not None:
                        self._read_report(key.data)
                    elif not self._read_requests():
                        return
        finally:
            for child in self.children.values():
                os.kill(child.pid, signal.SIGKILL)

    def _read_requests(self) -> bool:
        data = os.read(0, READ_BYTES)
        self.input += data
        *lines, self.input = self.input.split(b"\n") if b"\n" in data else [self.input]
        for line in lines:
            request = json.loads(line)
            if "cancel" in request:
                self._cancel(request["cancel"])
            else:
                self._fork(request["id"], Grammar(request["kind"], request["text"]))
        return bool(data)

    def _cancel(self, id: int) -> None:
        if child := self.children.get(id):
            os.kill(child.pid, signal.SIGKILL)

    def _fork(self, id: int, grammar: Grammar) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._run_child(grammar, writing)
        os.close(writing)
        child = Child(id, pid, reading)
        self.children[id] = child
        self.selector.register(reading, selectors.EVENT_READ, child)

    def _run_child(self, grammar: Grammar, pipe: int) -> None:
        """Write the report of a grammar to the pipe, and exit."""
        try:
            detach()
            set_limits()
            report = probe(self.tokenizer, grammar, self.vocabulary.stop_ids)
            with os.fdopen(pipe, "wb") as output:
                output.write(json.dumps(asdict(report)).encode())
        finally:  # Nothing may return into the loop of the parent.
            os._exit(0)

    def _read_report(self, child: Child) -> None:
        data = os.read(child.pipe, READ_BYTES)
        child.report += data
        if data:
            return
        self.selector.unregister(child.pipe)
        os.close(child.pipe)
        del self.children[child.id]
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        report = json.loads(child.report) if child.report and not code else died(code)
        reply({"id": child.id} | report)


def probe(tokenizer: "LLTokenizer", grammar: Grammar, stop_ids: tuple[int, ...]) -> ProbeReport:
    before = used_bytes()
    try:
        grammar = lark_of(grammar)
        matcher = build_matcher(tokenizer, grammar)
        try_answer(matcher, tokenizer, stop_ids)
    except UserError as error:
        return ProbeReport(problem=str(error))
    except MemoryError:
        return ProbeReport(problem=f"the grammar cannot be used: {DEATHS[signal.SIGABRT]}")
    except BaseException as error:  # A panic of llguidance is no Exception.
        return ProbeReport(problem=f"the grammar cannot be used: {type(error).__name__}")
    used = max(0, used_bytes() - before)
    return ProbeReport(memory_bytes=used, lark=grammar.text if grammar.kind == "lark" else "")


def detach() -> None:
    """Leave the parent's streams alone; Rust reports a dying process on standard error."""
    gc.disable()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def set_limits() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    if stack == resource.RLIM_INFINITY or stack > 2 * STACK_BYTES:
        stack = 2 * STACK_BYTES
    resource.setrlimit(resource.RLIMIT_STACK, (stack // 2, stack // 2))
    if address_space := memory_bytes()[0]:
        limit = address_space + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def used_bytes() -> int:
    """Memory that this process does not share with files; 0 where the system does not say."""
    return memory_bytes()[1]


def memory_bytes() -> tuple[int, int]:
    """The address space, and the resident memory without that of files."""
    with suppress(OSError):
        address_space, resident, of_files = map(int, STATM.read_text().split()[:3])
        page = resource.getpagesize()
        return address_space * page, (resident - of_files) * page
    return 0, 0


def died(code: int) -> dict[str, Any]:
    reason = DEATHS.get(signal.Signals(-code)) if code < 0 else None
    problem = reason or f"llguidance ended with code {code}"
    return asdict(ProbeReport(problem=f"the grammar cannot be used: {problem}"))


def reply(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent.
    vocabulary = Vocabulary.from_json(read_line())
    try:
        tokenizer = vocabulary.tokenizer()
        for grammar in WARM_UP:
            probe(tokenizer, grammar, vocabulary.stop_ids)
    except UserError as error:
        reply({"problem": str(error)})
        return
    with suppress(OSError, AttributeError):  # Free memory would hide what a grammar takes.
        ctypes.CDLL(None).malloc_trim(0)
    reply({"problem": ""})
    with suppress(BrokenPipeError):  # The parent has ended.
        ProbeServer(vocabulary, tokenizer).run()


def read_line() -> bytes:
    """The first line of standard input; the parent sends the next one after the reply to it."""
    line = bytearray()
    while not line.endswith(b"\n") and (data := os.read(0, READ_BYTES)):
        line += data
    return bytes(line)
