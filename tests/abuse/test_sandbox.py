"""Programs that attack every variant of the sandbox that this machine supports."""

import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from peagle.bench.quality.programs import Submission
from peagle.bench.quality.sandbox import passes
from peagle.bench.quality.sandbox.sandbox import Sandbox
from tests.support.bench.hostile import (
    ORDINARY_USER,
    as_ordinary_user,
    is_alive,
    outside_folder,
    own_sandbox,
    package_parent,
    runs,
    sandboxes,
    victim_process,
)

pytestmark = [
    pytest.mark.abuse,
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux"),
]
WAYS = ("own", "own without namespaces", "bubblewrap", "bubblewrap without Landlock")
MIB = 1 << 20


@pytest.fixture(params=WAYS)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    ways = sandboxes()
    if request.param not in ways:
        pytest.skip("bubblewrap is not installed: apt-get install bubblewrap")
    return ways[request.param]


# System call numbers of x86_64. Each call changes something outside the process or its privileges.
SYSTEM_CALLS = {
    "socket": 41,
    "socketpair": 53,
    "clone": 56,
    "fork": 57,
    "vfork": 58,
    "execve": 59,
    "kill": 62,
    "shmget": 29,
    "truncate": 76,
    "chmod": 90,
    "fchmod": 91,
    "chown": 92,
    "ptrace": 101,
    "setuid": 105,
    "setsid": 112,
    "mknod": 133,
    "personality": 135,
    "setpriority": 141,
    "prctl": 157,
    "chroot": 161,
    "mount": 165,
    "umount2": 166,
    "reboot": 169,
    "init_module": 175,
    "setxattr": 188,
    "tkill": 200,
    "sched_setaffinity": 203,
    "tgkill": 234,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "inotify_init": 253,
    "unshare": 272,
    "utimensat": 280,
    "perf_event_open": 298,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "seccomp": 317,
    "memfd_create": 319,
    "bpf": 321,
    "execveat": 322,
    "userfaultfd": 323,
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "fsopen": 430,
    "fsmount": 432,
    "pidfd_open": 434,
    "openat2": 437,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "an unknown call": 4242,
}


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the system call numbers are those of x86_64"
)
def test_system_calls_are_refused(sandbox: Sandbox) -> None:
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"calls = {SYSTEM_CALLS!r}\n"
        "done = []\n"
        "for name, number in calls.items():\n"
        "    ctypes.set_errno(0)\n"
        "    result = libc.syscall(number, *[ctypes.c_long(0)] * 6)\n"
        "    if (result, ctypes.get_errno()) != (-1, 1):\n"
        "        done.append((name, result, ctypes.get_errno()))\n"
        "def answer():\n    return done\n"
    )
    test = "def check(candidate):\n    assert candidate() == []\n"
    assert passes(Submission(code, "", test, "answer"), sandbox=sandbox)
    assert not passes(Submission(code, "", test, "answer"), sandbox=own_sandbox("landlock"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the test contains x86_64 machine code")
@pytest.mark.parametrize("abi", ["i386", "x32"])
def test_other_system_call_tables_are_refused(abi: str, sandbox: Sandbox) -> None:
    """getpid through int 0x80 (i386) and with the x32 bit: the filter does not allow these ABIs."""
    machine_code = {
        "i386": "b814000000cd80c3",  # mov eax, 20; int 0x80; ret
        "x32": "b8270000400f05c3",  # mov eax, 0x40000027; syscall; ret
    }[abi]
    code = (
        "import ctypes, mmap\n"
        "memory = mmap.mmap(-1, 4096, prot=7)\n"
        f"memory.write(bytes.fromhex({machine_code!r}))\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        "ctypes.CFUNCTYPE(ctypes.c_long)(address)()\n"
    )
    assert not runs(code, sandbox)


FILE_ACCESSES = {
    "open": "open(OUTSIDE + '/new', 'w')",
    "dir_fd": "import os\nfolder = os.open('/', os.O_RDONLY | os.O_PATH)\n"
    "os.open(OUTSIDE[1:] + '/new', os.O_CREAT | os.O_WRONLY, dir_fd=folder)",
    "chdir": "import os\nos.chdir(OUTSIDE)\nopen('new', 'w')",
    "dots": "import os\nopen('../' * 30 + OUTSIDE[1:] + '/new', 'w')",
    "sqlite3": "import sqlite3\nwith sqlite3.connect(OUTSIDE + '/new') as c:\n"
    "    c.execute('create table t (x)')",
    "sqlite3 attach": "import sqlite3\nwith sqlite3.connect('mine') as c:\n"
    '    c.execute("attach \'" + OUTSIDE + "/new\' as other")\n'
    "    c.execute('create table other.t (x)')",
    "dbm": "import dbm.dumb\ndbm.dumb.open(OUTSIDE + '/new', 'c')['a'] = 'b'",
    "a hard link": "import os\nos.link(OUTSIDE + '/victim.txt', 'mine')\nopen('mine', 'w')",
    "moves in": "import os\nos.rename(OUTSIDE + '/victim.txt', 'mine')",
    "moves out": "import os\nopen('mine', 'w').close()\nos.rename('mine', OUTSIDE + '/new')",
    "folder": "import os\nos.mkdir(OUTSIDE + '/new')",
    "truncates": "import os\nos.truncate(OUTSIDE + '/victim.txt', 0)",
    "chmod": "import os\nos.chmod(OUTSIDE + '/victim.txt', 0o4777)",
    "reads": "assert open(OUTSIDE + '/victim.txt').read().startswith('untouched')",
    "lists": "import os\nassert os.listdir(OUTSIDE)",
}


@pytest.mark.parametrize("code", FILE_ACCESSES.values(), ids=FILE_ACCESSES.keys())
def test_files_outside_are_out_of_reach(code: str, sandbox: Sandbox) -> None:
    with outside_folder() as folder:
        attack = f"OUTSIDE = {str(folder)!r}\n{code}"
        assert not runs(attack, sandbox)
        assert [path.name for path in folder.iterdir()] == ["victim.txt"]
        assert (folder / "victim.txt").read_text() == "untouched" * 10
        assert not (folder / "victim.txt").stat().st_mode & 0o4000


ATTACKS_ON_A_PROCESS = {
    "kill": "os.kill(VICTIM, 9)",
    "pidfd": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9)",
    "queue": "assert libc.syscall(129, VICTIM, 9, ctypes.create_string_buffer(128)) == 0",
    "prlimit": "resource.prlimit(VICTIM, resource.RLIMIT_AS, (0, 0))",
    "owner of a pipe": "r, w = os.pipe()\nassert libc.fcntl(r, 8, VICTIM) == 0\n"
    "assert libc.fcntl(r, 10, 9) == 0",
    "ptrace": "assert libc.ptrace(16, VICTIM, 0, 0) == 0",
    "memory": "open(f'/proc/{VICTIM}/mem', 'rb')",
    "environment": "open(f'/proc/{VICTIM}/environ', 'rb').read()",
    "priority": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "processors": "os.sched_setaffinity(VICTIM, {0})",
}


@pytest.mark.parametrize("code", ATTACKS_ON_A_PROCESS.values(), ids=ATTACKS_ON_A_PROCESS.keys())
def test_other_processes_are_out_of_reach(code: str, sandbox: Sandbox) -> None:
    imports = "import ctypes, os, resource, signal\nlibc = ctypes.CDLL(None)\n"
    with victim_process() as victim:
        for number in (victim.pid, os.getpid(), "os.getppid() or 1"):
            assert not runs(f"{imports}VICTIM = {number}\n{code}", sandbox)
        assert is_alive(victim)


def test_root_and_shells_are_not_available(sandbox: Sandbox) -> None:
    """Regression test: programs once ran as uid 0 and could start a shell."""
    for code in (
        "import subprocess\nassert b'uid=0' in subprocess.check_output(['id'])",
        "import os\nassert os.getuid() == 0",
        "import os\nos.setuid(0)",
        "import os\nassert os.system('id') == 0",
        "import os\nos.execv('/bin/sh', ['sh'])",
        "import os\nos.posix_spawn('/bin/sh', ['sh'], {})",
    ):
        assert not runs(code, sandbox), code


def test_a_flood_of_output_does_not_fill_the_parents_memory(sandbox: Sandbox) -> None:
    """The program writes 400 MB to every descriptor, raw and after a frame header."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for start in ("", "(1 << 23).to_bytes(4, 'big') + "):
        code = (
            "import os\n"
            "for fd in range(64):\n"
            "    try:\n"
            f"        os.write(fd, {start}b'pass')\n"
            "        for _ in range(400):\n"
            "            os.write(fd, b'p' * (1 << 20))\n"
            "    except OSError:\n"
            "        pass\n"
        )
        assert not runs(code, sandbox, seconds=5)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 50 * 1024  # KiB


def test_only_pipes_are_inherited(sandbox: Sandbox) -> None:
    keep = tempfile.TemporaryFile()  # noqa: SIM115
    os.set_inheritable(keep.fileno(), True)
    code = (
        "import os, stat\nkinds = []\n"
        "for fd in range(256):\n"
        "    try:\n"
        "        mode = os.fstat(fd).st_mode\n"
        "    except OSError:\n"
        "        continue\n"
        "    kind = 'null' if stat.S_ISCHR(mode) else 'pipe' if stat.S_ISFIFO(mode) else '?'\n"
        "    kinds.append(kind)\n"
        "def answer():\n    return kinds\n"
    )
    test = "def check(candidate):\n    assert candidate() == ['null'] * 3 + ['pipe'] * 2\n"
    assert passes(Submission(code, "", test, "answer"), sandbox=sandbox)
    keep.close()


def leftovers() -> set[str]:
    pattern = "peagle-sandbox-*"
    found = {path.name for path in Path(tempfile.gettempdir()).glob(pattern)}
    return {name for name in found if not name.startswith("peagle-sandbox-runtime-")}


LEFTOVERS = {
    "nested": "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')",
    "long names": "import os\nfor _ in range(60):\n    os.mkdir('d' * 250)\n"
    "    os.chdir('d' * 250)",
    "closed folders": "import os\nfor i in range(9):\n    os.makedirs(f'{i}/a')\n"
    "    os.mkdir(f'{i}/b', 0)",
    "links": "import os\nos.symlink('/', 'root')\nos.symlink('.', 'loop')\nos.symlink('x', 'x')",
    "odd names": "import os\nfor name in (b'\\xff', b'\\n', b'-rf', b' '):\n    os.mkdir(name)",
}


@pytest.mark.parametrize("code", LEFTOVERS.values(), ids=LEFTOVERS.keys())
def test_all_files_of_a_run_are_removed(code: str, sandbox: Sandbox) -> None:
    before = leftovers()
    runs(code, sandbox)
    assert leftovers() <= before


def test_the_disk_is_not_filled(sandbox: Sandbox) -> None:
    code = (
        "i = 0\n"
        "while True:\n"
        "    i += 1\n"
        "    with open(str(i), 'wb') as f: f.write(b'0' * (1 << 20))\n"
    )
    free = shutil.disk_usage(tempfile.gettempdir()).free
    start = time.monotonic()
    lowest = free
    thread = threading.Thread(target=runs, args=(code, sandbox))
    thread.start()
    while thread.is_alive():
        lowest = min(lowest, shutil.disk_usage(tempfile.gettempdir()).free)
        time.sleep(0.02)
    assert time.monotonic() - start < 10
    assert free - lowest < 2048 * MIB


def test_memory_and_cpu_time_are_limited(sandbox: Sandbox) -> None:
    start = time.monotonic()
    assert not runs("x = []\nwhile True: x.append(bytearray(1 << 24))", sandbox)
    assert not runs("while True: pass", sandbox, seconds=200)
    assert time.monotonic() - start < 200  # 10 s of CPU, longer on a busy machine


def test_no_process_survives_a_run(sandbox: Sandbox) -> None:
    runs("import time\ntime.sleep(3600)", sandbox, seconds=1)
    time.sleep(0.2)
    runtime = sandbox.runtime.encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert runtime not in path.read_bytes(), path
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_hostile_tests_of_a_set_are_confined(sandbox: Sandbox) -> None:
    """A downloaded set may be hostile too: its test code runs in the sandbox as well."""
    with outside_folder() as folder:
        for attack in (
            f"open({str(folder)!r} + '/new', 'w')",
            "__import__('os').system('true') == 0 or 1 / 0",
            "__import__('socket').socket()",
        ):
            test = f"{attack}\n\ndef check(candidate):\n    candidate(1)\n"
            assert not passes(Submission("def f(x): ...", "", test, "f"), sandbox=sandbox)
        assert [path.name for path in folder.iterdir()] == ["victim.txt"]


AS_A_USER = """
import json, os
from peagle.bench.quality.programs import Submission
from peagle.bench.quality.sandbox import find_sandbox, passes

TEST = "def check(candidate):\\n    assert candidate() == 'yes'\\n"
END = "\\n\\ndef ran():\\n    return 'yes'\\n"
passed = [name for name, code in CODES.items() if passes(Submission(code + END, "", TEST, "ran"))]
print(json.dumps([os.getuid(), find_sandbox().as_nobody, passed]))
"""
ATTACKS_OF_A_USER = {
    **FILE_ACCESSES,
    "kills its parent": "import os\nos.kill(os.getppid() or 1, 9)",
    "pidfd": "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid() or 1), 9)",
    "a socket": "import socket\nsocket.socket()",
    "a shell": "import os\nassert os.system('id') == 0",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    "path", ["/usr/bin:/bin", "/nowhere"], ids=["default PATH", "without tools"]
)
def test_attacks_of_an_ordinary_user_fail(path: str) -> None:
    """The attacks also fail without root, against files and processes of the same user."""
    if not all(folder.stat().st_mode & 0o001 for folder in Path(package_parent(), "x").parents):
        pytest.skip("the package is in a folder that other users cannot enter")
    with outside_folder() as folder:
        codes = {"harmless": "import json\nopen('x', 'w').write('1')"}
        for name, code in ATTACKS_OF_A_USER.items():
            codes[name] = f"OUTSIDE = {str(folder)!r}\n{code}"
        os.chown(folder / "victim.txt", ORDINARY_USER, ORDINARY_USER)
        result = as_ordinary_user(f"CODES = {codes!r}\n{AS_A_USER}", path)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout) == [ORDINARY_USER, False, ["harmless"]]
        assert [found.name for found in folder.iterdir()] == ["victim.txt"]
