"""LearnFolder: the folder that server, trainer and `peagle learn` share, and whose answers it has.

A folder belongs to one target. Answers of another one would teach a drafter the wrong tokens, so
`open` refuses the folder and changes nothing in it.
"""

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

from peagle.errors import UserError
from peagle.paths import write_json

FORMAT_VERSION = 1
SAMPLE_BYTES = 1 << 16  # Of each file of weights, at its start and in its middle.
IDENTITY_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS_SUFFIXES = (".safetensors", ".gguf", ".bin")


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The target whose answers a folder has. Only `digest` and `vocab_size` are compared."""

    target: str
    revision: str | None
    vocab_size: int
    digest: str
    created: float = field(default_factory=time.time)
    format: int = FORMAT_VERSION

    def matches(self, other: "StoreIdentity") -> bool:
        return (self.digest, self.vocab_size) == (other.digest, other.vocab_size)


class LearnFolder:
    def __init__(self, root: Path) -> None:
        self.root = Path(root).expanduser()
        self.documents = self.root / "documents"
        self.versions = self.root / "versions"
        self.load = self.root / "load"
        self.identity = self.root / "store.json"
        self.current = self.root / "current.json"
        self.trainer = self.root / "trainer.json"
        self.events = self.root / "events.jsonl"
        self.learner_lock = self.root / "learner.lock"  # file_lock.py
        self.versions_lock = self.root / "versions.lock"

    def require_writable(self) -> None:
        """Create the folder if there is none. UserError: nothing can be written to it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise UserError(
                f"cannot write to {self.root} ({error.strerror or error}): name another folder with"
                " `learn`, or let this user write to it"
            ) from error

    def open(self, identity: StoreIdentity) -> None:
        """Create the folder, or check that it belongs to this target (UserError)."""
        try:
            known = self.read_identity()
            if known is None:
                self._create(identity)
                return
        except OSError as error:
            raise UserError(f"cannot use {self.root}: {error}") from error
        if known.format != FORMAT_VERSION:
            raise UserError(
                f"{self.root} has format {known.format}, this version reads {FORMAT_VERSION}:"
                " use another folder"
            )
        if not known.matches(identity):
            raise UserError(
                f"{self.root} has answers of the target {known.target!r}, which differs from"
                f" {identity.target!r}: use another folder"
            )

    def read_identity(self) -> StoreIdentity | None:
        """The target of this folder; None: it is not used yet. UserError: the file is broken."""
        try:
            return StoreIdentity(**json.loads(self.identity.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{self.identity} is broken ({error}): restore it, or use another folder"
            ) from error

    def _create(self, identity: StoreIdentity) -> None:
        foreign = self.documents.is_dir() and any(self.documents.iterdir())
        if foreign and not self.identity.exists():  # Another process may create it.
            raise UserError(
                f"{self.root} has documents but no {self.identity.name}: restore that file, or use"
                " another folder"
            )
        for folder in (self.documents, self.versions, self.load):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(self.identity, asdict(identity))


def target_identity(
    folder: Path, name: str, revision: str | None, vocab_size: int
) -> StoreIdentity:
    """The identity of the target in `folder`: config, tokenizer and a sample of its weights.

    The name and the path do not matter: a copy of the same files is the same target.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name in IDENTITY_FILES:
            digest.update(file.name.encode() + file.read_bytes())
        elif file.suffix in WEIGHTS_SUFFIXES and file.is_file():
            digest.update(file.name.encode() + sample(file))
    return StoreIdentity(name, revision, vocab_size, digest.hexdigest()[:32])


def sample(file: Path) -> bytes:
    """The size of a file, its first bytes and those in its middle."""
    size = file.stat().st_size
    with file.open("rb") as content:
        start = content.read(SAMPLE_BYTES)
        content.seek(size // 2)
        return size.to_bytes(8, "little") + start + content.read(SAMPLE_BYTES)
