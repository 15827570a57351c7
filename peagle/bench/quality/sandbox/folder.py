"""The working folder of a hostile program: how much is in it, and how it is removed."""

import os
import stat
import time

MAX_FOLDER_ENTRIES = 2_000
MAX_FOLDER_BYTES = 64 << 20
REMOVAL_SECONDS = 5.0  # a killed process may still finish its last system call


def is_too_full(folder: str) -> bool:
    """Looks at no more entries than are allowed, so it takes milliseconds at most."""
    entries = size = 0
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as found:
                for entry in found:
                    entries += 1
                    size += entry.stat(follow_symlinks=False).st_size
                    if entries > MAX_FOLDER_ENTRIES or size > MAX_FOLDER_BYTES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except FileNotFoundError:
            continue  # removed meanwhile
        except PermissionError:
            continue  # a folder that the program closed to everyone, itself included
        except OSError:
            return True  # nested deeper than a path can name
    return False


def remove_folder(folder: str) -> None:
    """Without recursion and without long paths: inner folders move up to `folder` one by one."""
    deadline = time.monotonic() + REMOVAL_SECONDS
    while True:
        try:
            root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                empty_folder(root)
            finally:
                os.close(root)
            os.rmdir(folder)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def empty_folder(root: int) -> None:
    serial = 0
    while names := os.listdir(root):
        for name in names:
            if not is_folder(name, root):
                os.unlink(name, dir_fd=root)
                continue
            inner = open_folder(name, root)
            try:
                for child in os.listdir(inner):
                    if is_folder(child, inner):
                        os.close(open_folder(child, inner))
                        serial += 1
                        new_name = f"{os.urandom(8).hex()}-{serial}"
                        os.rename(child, new_name, src_dir_fd=inner, dst_dir_fd=root)
                    else:
                        os.unlink(child, dir_fd=inner)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=root)


def is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def open_folder(name: str, parent: int) -> int:
    """Opens it for changes, whatever mode the program gave it. Never follows a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        inner = os.open(name, flags, dir_fd=parent)
    except PermissionError:  # mkdir() with a mode of 0; root does not come here
        os.chmod(name, stat.S_IRWXU, dir_fd=parent)
        inner = os.open(name, flags, dir_fd=parent)
    os.fchmod(inner, stat.S_IRWXU)
    return inner
