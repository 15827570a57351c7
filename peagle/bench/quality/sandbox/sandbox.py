"""Sandbox: how a confined process is started on this machine."""

from dataclasses import dataclass

from peagle.errors import UserError

NOBODY_ID = 65534
OWN_BARRIERS = ("namespaces", "landlock", "seccomp")
BUBBLEWRAP_BARRIERS = ("landlock if possible", "seccomp")
DEVICES = ("/dev/null", "/dev/urandom")


class SandboxError(UserError):
    """Programs cannot be run safely here; the message says why."""


@dataclass(frozen=True)
class Sandbox:
    interpreter: str
    runtime: str  # folder with the code of child/
    read_paths: tuple[str, ...]  # the standard library and shared libraries
    environment: tuple[tuple[str, str], ...] = ()
    as_nobody: bool = False
    bubblewrap: str | None = None
    barriers: tuple[str, ...] = OWN_BARRIERS

    def command(self, folder: str) -> list[str]:
        python = [self.interpreter, "-I", "-S", self.runtime]
        if self.bubblewrap is None:
            return python
        return [self.bubblewrap, *self.bubblewrap_options(folder), "--", *python]

    def bubblewrap_options(self, folder: str) -> list[str]:
        """No network, no other process, no /proc; a file system with these paths only."""
        options = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
        options += ["--uid", str(NOBODY_ID), "--gid", str(NOBODY_ID)]
        for path in (*self.read_paths, self.interpreter, self.runtime):
            options += ["--ro-bind-try", path, path]
        for path in DEVICES:
            options += ["--dev-bind-try", path, path]
        return [*options, "--bind", folder, folder, "--remount-ro", "/", "--chdir", folder]
