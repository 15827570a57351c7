"""The sandbox: allowed programs, blocked programs, and systems on which it refuses to run."""

import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from peagle.bench.quality.programs import Submission
from peagle.bench.quality.sandbox import find_sandbox, launch, passes
from peagle.bench.quality.sandbox.child import syscalls
from peagle.bench.quality.sandbox.child.seccomp import build_filter
from peagle.bench.quality.sandbox.child.wire import UnsupportedValue, decode, encode
from peagle.bench.quality.sandbox.folder import remove_folder
from peagle.bench.quality.sandbox.run import run_submission, write_job
from peagle.bench.quality.sandbox.sandbox import OWN_BARRIERS, Sandbox, SandboxError
from peagle.bench.quality.scoring import require_scoring
from peagle.data.bench import Task
from tests.support.bench.hostile import (
    is_alive,
    outside_folder,
    own_sandbox,
    program,
    runs,
    victim_process,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


HARMLESS = {
    "the standard library": "import collections, datetime, decimal, functools, hashlib, itertools\n"
    "import json, math, random, re, sqlite3, statistics, string, tempfile",
    "a file of its own": "open('x', 'w').write('1')\nassert open('x').read() == '1'\n"
    "import os\nos.remove('x')",
    "folders of its own": "import os, shutil\nos.makedirs('a/b')\nos.rename('a/b', 'c')\n"
    "shutil.rmtree('a')\nassert os.listdir() == ['c']",
    "a temporary file": "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'1')",
    "a database of its own": "import sqlite3\nwith sqlite3.connect('x.db') as c:\n"
    "    c.execute('create table t (x)')",
    "prints a lot": "for _ in range(20000): print('x' * 50)",
    "time": "import time, signal\ntime.sleep(0.01)\nsignal.alarm(30)\nsignal.alarm(0)",
}
HARMFUL = {
    "sleeps": "import time\ntime.sleep(60)",
    "eats memory": "x = bytearray(3 << 30)",
    "eats the disk": "with open('x', 'wb') as f:\n"
    "    for _ in range(64): f.write(b'0' * (1 << 20))",
    "forks": "import os\nos.fork()",
    "starts a process": "import subprocess\nsubprocess.run(['true'], check=True)",
    "a shell": "import os\nassert os.system('true') == 0",
    "raises its limits": "import resource\n"
    "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "reads the environment": "import os\nassert os.environ.get('HOME') or os.environ.get('PATH')",
    "a socket": "import socket\nsocket.socket()",
    "exits": "import os\nos._exit(0)",
    "is root": "import os\nassert 0 in os.getresuid() + os.getresgid()",
    "lists a home": "import os\nos.listdir('/root')\nos.listdir('/home')",
    "reads /proc": "open('/proc/self/cmdline').read()",
}


@pytest.mark.parametrize("code", HARMLESS.values(), ids=HARMLESS.keys())
def test_harmless_programs_run(code: str) -> None:
    assert runs(code)


@pytest.mark.parametrize("code", HARMFUL.values(), ids=HARMFUL.keys())
def test_harmful_programs_are_stopped(code: str) -> None:
    assert not runs(code, seconds=2 if code == HARMFUL["sleeps"] else 20)


WRITE_ELSEWHERE = {
    "open": "open(OUTSIDE + '/new', 'w').write('x')",
    "dir_fd": "import os\nfolder = os.open(OUTSIDE, os.O_RDONLY | os.O_PATH)\n"
    "os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=folder)",
    "sqlite3": "import sqlite3\nwith sqlite3.connect(OUTSIDE + '/new') as c:\n"
    "    c.execute('create table t (x)')",
    "native code": "import ctypes\nlibc = ctypes.CDLL(None)\n"
    "assert libc.creat((OUTSIDE + '/new').encode(), 0o666) >= 0",
    "truncate": "import os\nos.truncate(OUTSIDE + '/victim.txt', 1)",
    "chmod": "import os\nos.chmod(OUTSIDE + '/victim.txt', 0o777)",
    "times": "import os\nos.utime(OUTSIDE + '/victim.txt', (1, 1))",
    "a link": "import os\nos.symlink(OUTSIDE, 'link')\nopen('link/new', 'w')",
    "removes": "import os\nos.remove(OUTSIDE + '/victim.txt')",
}


def state(folder: Path) -> dict[str, tuple[int, int, int]]:
    return {
        path.name: (path.stat().st_size, path.stat().st_mode, path.stat().st_mtime_ns)
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("code", WRITE_ELSEWHERE.values(), ids=WRITE_ELSEWHERE.keys())
def test_files_outside_do_not_change(code: str) -> None:
    """Control: without the barriers, the same program succeeds."""
    with outside_folder() as folder:
        before = state(folder)
        attack = f"OUTSIDE = {str(folder)!r}\n{code}"
        assert not runs(attack)
        assert state(folder) == before
        assert runs(attack, own_sandbox())
        assert state(folder) != before


SIGNALS = {
    "kill": "os.kill(VICTIM, 9)",
    "pidfd_send_signal": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9)",
    "its group": "os.killpg(VICTIM, 9)",
    "prlimit": "import resource\nresource.prlimit(VICTIM, resource.RLIMIT_CPU, (0, 0))",
}


@pytest.mark.parametrize("code", SIGNALS.values(), ids=SIGNALS.keys())
@pytest.mark.parametrize("barriers", [OWN_BARRIERS, ("seccomp",)], ids=["all", "seccomp alone"])
def test_no_signal_to_another_process(code: str, barriers: tuple[str, ...]) -> None:
    with victim_process() as victim:
        attack = f"import os, signal\nVICTIM = {victim.pid}\n{code}"
        assert not runs(attack, own_sandbox(*barriers))
        assert is_alive(victim)


def test_signals_arrive_without_the_barriers() -> None:
    with victim_process() as victim:
        attack = f"import os, signal\nVICTIM = {victim.pid}\n{SIGNALS['pidfd_send_signal']}"
        assert runs(attack, own_sandbox())
        assert victim.wait(60) == -9


@pytest.mark.parametrize("barriers", [OWN_BARRIERS, ("seccomp",), ()], ids=["all", "seccomp", "no"])
def test_no_network(barriers: tuple[str, ...]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2).close()"
        assert runs(code, own_sandbox(*barriers)) == (not barriers)
        if barriers:
            with pytest.raises(TimeoutError):
                listener.accept()
        else:
            listener.accept()[0].close()


def test_the_program_cannot_see_the_test() -> None:
    """Frames, arguments and live objects contain neither the test nor an expected value."""
    secret = "expected-value"
    code = (
        "import gc, sys\n"
        "def answer():\n"
        "    frame, seen = sys._getframe(), [repr(sys.orig_argv), repr(sys.argv)]\n"
        "    while frame:\n"
        "        seen.append(repr(frame.f_locals) + repr(frame.f_globals))\n"
        "        frame = frame.f_back\n"
        "    seen += [repr(x) for x in gc.get_objects() if not isinstance(x, type)]\n"
        "    text = ''.join(seen)\n"
        "    found = '-'.join(['expected', 'value']) in text\n"
        "    return ['found' if found else 'nothing', len(text) > 10_000]\n"
    )
    test = f"def check(candidate):\n    '{secret}'\n    assert candidate() == ['nothing', True]\n"
    assert passes(Submission(code, "", test, "answer"))


FORGERIES = {
    "writes a verdict everywhere": "import os\nfor fd in range(3, 64):\n"
    "    try: os.write(fd, b'pass')\n    except OSError: pass\nos._exit(0)",
    "replies to itself": "import os, sys\nfrom peagle.bench.quality.sandbox.child import wire\n"
    "for fd in range(3, 64):\n    try:\n"
    "        for _ in range(9): wire.write_frame(fd, wire.encode(['returned', None, {}]))\n"
    "    except OSError: pass",
    "patches the judge": "from peagle.bench.quality.sandbox.child import judge\n"
    "judge.run_judge = judge.run_test = lambda *args: 'pass'\nraise SystemExit(0)",
    "patches built-ins": "import builtins\nbuiltins.AssertionError = builtins.Exception\n"
    "builtins.compile = builtins.exec = lambda *args: None",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
}


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_pass_cannot_be_forged(code: str) -> None:
    wrong = "\n\ndef answer(x):\n    return 0\n"
    test = "def check(candidate):\n    try:\n        assert candidate(1) == 2\n    finally:\n"
    test += "        assert candidate(2) == 3\n"
    assert not passes(Submission(code + wrong, "", test, "answer"))


def test_a_program_that_exits_fails_a_test_that_catches_everything() -> None:
    test = "def check(candidate):\n    try:\n        candidate()\n    except BaseException:\n"
    test += "        pass\n"
    code = "import os\n\ndef answer():\n    os._exit(0)\n"
    assert not passes(Submission(code, "", test, "answer"))


CALLS = {
    "helpers of the prompt": ("def f(x):\n    return x", "assert helper(candidate(1)) == 2"),
    "the function by its name": ("def f(x):\n    return x", "assert f(1) == candidate(1) == 1"),
    "an exception": (
        "def f(x):\n    raise ValueError('no')",
        "try:\n        candidate(1)\n        assert False\n    except ValueError as e:\n"
        "        assert str(e) == 'no'",
    ),
    "an exception of its own": (
        "class Odd(KeyError): ...\n\ndef f(x):\n    raise Odd('no')",
        "try:\n        candidate(1)\n        assert False\n    except KeyError:\n        pass",
    ),
    "changes in place": (
        "def f(x):\n    x.sort()",
        "values = [2, 1]\n    assert candidate(values) is None\n    assert values == [1, 2]",
    ),
    "an iterator": ("def f(x):\n    yield x", "assert list(candidate(1)) == [1]"),
    "a subclass": (
        "import collections\ndef f(x):\n    return collections.Counter(x)",
        "assert candidate('aab') == {'a': 2, 'b': 1}",
    ),
    "named arguments": ("def f(x, y=0):\n    return x - y", "assert candidate(3, y=1) == 2"),
    "a large number": ("def f(x):\n    return 2**x", "assert candidate(99_999) == 2**99_999"),
    "an infinite number": ("def f(x):\n    return -x", "assert candidate(1e999) == -1e999"),
}


@pytest.mark.parametrize(("code", "test"), CALLS.values(), ids=CALLS.keys())
def test_calls_between_test_and_function(code: str, test: str) -> None:
    setup = "def helper(x):\n    return x + 1\n"
    assert passes(Submission(code, setup, f"def check(candidate):\n    {test}\n", "f"))


def test_a_test_that_the_sandbox_cannot_run_is_an_error() -> None:
    test = "def check(candidate):\n    candidate(lambda x: x)\n"
    with pytest.raises(SandboxError, match=r"cannot be scored: .* a value of type function"):
        passes(Submission("def f(x):\n    return x", "", test, "f"))


VALUES: list[Any] = [
    None,
    True,
    0,
    -(2**70),
    1.5,
    float("inf"),
    "ä\ud800",
    b"\x00",
    bytearray(b"x"),
    2j,
    range(1, 9, 2),
    [1, [2, (3, {4: {5}})]],
    frozenset({1}),
    Fraction(1, 3),
    Decimal("1.10"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_survive_encoding(value: object) -> None:
    copy = decode(encode(value))
    assert copy == value
    assert type(copy) is type(value)


def test_broken_frames_are_errors() -> None:
    for data in (b"", b"i", b"i\x00\x00\x00\x051", b"l\xff\xff\xff\xff", encode(1) + b"x"):
        with pytest.raises(ValueError):
            decode(data)
    with pytest.raises(UnsupportedValue):
        encode(object())


def test_the_filter_has_the_numbers_of_the_kernel_headers() -> None:
    header = Path("/usr/include/asm-generic/unistd.h")
    native = next(Path("/usr/include").glob("*/asm/unistd_64.h"), None)
    if native is None or "x86_64" not in str(native) or not header.exists():
        pytest.skip("the x86_64 kernel headers are not installed")
    x86_64 = dict(line.split()[1:3] for line in native.read_text().split("\n") if " __NR_" in line)
    generic = {
        words[1].replace("3264", "").replace("_fstatat", "_newfstatat"): words[2]
        for line in header.read_text().split("\n")
        if len(words := line.split()) >= 3 and words[2].isdigit() and words[1].startswith("__NR")
    }
    rows = [*syscalls.ALLOWED, *((name, a, b) for name, a, b, *_ in syscalls.SELECTED)]
    for name, on_x86_64, on_aarch64 in rows:
        assert x86_64[f"__NR_{name}"] == str(on_x86_64), name
        if on_aarch64 is not None:
            assert generic[f"__NR_{name}"] == str(on_aarch64), name
    for machine in ("x86_64", "aarch64"):
        assert len(build_filter(machine)) < 4096  # the kernel's maximum


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if possible: creating a thousand folders takes seconds on a disk."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    remove_folder(str(folder))


def test_deep_folders_are_removed(fast_folder: Path) -> None:
    """Folders beyond the recursion and path limits are removed; links are not followed."""
    kept = fast_folder / "kept"
    kept.mkdir()
    (kept / "file").touch()
    top = fast_folder / "top"
    top.mkdir()
    inner = os.open(top, os.O_RDONLY)
    for depth in range(1_100):
        name = "x" * (200 if depth < 40 else 1)
        os.mkdir(name, dir_fd=inner)
        os.symlink(kept, "link", dir_fd=inner)
        outer, inner = inner, os.open(name, os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.mkdir("closed", 0, dir_fd=inner)
    os.close(inner)
    with pytest.raises((RecursionError, OSError)):
        shutil.rmtree(top)
    remove_folder(str(top))
    assert not top.exists()
    assert (kept / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can stay root")
def test_nothing_runs_as_root(tmp_path: Path) -> None:
    """The child process refuses to run as root, independently of the process that starts it."""
    sandbox = find_sandbox()
    assert sandbox.as_nobody
    with (tmp_path / "frames").open("w+b") as frames:
        write_job(frames, sandbox, program(f"open({str(tmp_path / 'ran')!r}, 'w')"))
        result = subprocess.run(
            [sandbox.interpreter, "-I", "-S", sandbox.runtime],
            stdin=frames,
            stdout=subprocess.PIPE,
            env=dict(sandbox.environment),
        )
    assert result.stdout == b"refused the process is still root"
    assert not (tmp_path / "ran").exists()


def with_refused_call(folder: Path, file: str, call: str, other: str) -> Sandbox:
    """The sandbox of this machine, as if the kernel refused one system call."""
    sandbox = own_sandbox(*OWN_BARRIERS)
    shutil.copytree(sandbox.runtime, folder, ignore=shutil.ignore_patterns("__pycache__"))
    [source] = folder.rglob(file)
    assert call in source.read_text()
    source.write_text(source.read_text().replace(call, other))
    read_paths = (*sandbox.read_paths, str(folder))
    return dataclasses.replace(sandbox, runtime=str(folder), read_paths=read_paths)


def test_programs_are_confined_without_namespaces() -> None:
    """Namespaces are an additional barrier: the others suffice if `unshare` fails."""
    with outside_folder() as folder:
        refused = with_refused_call(folder / "a", "confine.py", "unshare(NAMESPACES)", "unshare(1)")
        verdict = run_submission(refused, program(""), 20).split()
        assert verdict == ["pass", "limits", "privileges", "landlock", "seccomp"]
        assert not runs(HARMFUL["a socket"], refused)
    verdict = run_submission(own_sandbox(*OWN_BARRIERS), program(""), 20).split()
    if "namespaces" not in verdict:
        pytest.skip("this kernel does not allow user namespaces")


def test_no_landlock_and_no_bubblewrap_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with outside_folder() as folder:
        sandbox = with_refused_call(
            folder / "runtime", "landlock.py", "444, 445, 446", "1444, 1445, 1446"
        )
        assert run_submission(sandbox, program(""), 20).startswith("refused [Errno 38] Landlock")
        monkeypatch.setattr(launch, "possible_sandboxes", lambda: [sandbox])
        with pytest.raises(SandboxError, match=r"Landlock: Function not implemented.*bubblewrap"):
            find_sandbox.__wrapped__()


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find_sandbox.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    programs = dict.fromkeys(("prompt", "test", "entry_point"), "x")
    try:
        require_scoring({"sums": [Task("a", ("?",), extra={"answer": "#### 4"})]})
        with pytest.raises(SandboxError, match=r"cannot be scored on darwin.*use Linux"):
            require_scoring({"code": [Task("a", ("?",), extra=programs)]})
    finally:
        find_sandbox.cache_clear()
