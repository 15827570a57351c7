"""A local drafter beside the files that mount it: exported for vLLM, or copied for this package."""

import filecmp
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.errors import UserError
from peagle.paths import replace_folder

if TYPE_CHECKING:
    from peagle.catalog.pair import Pair
    from peagle.drafter import Drafter
    from peagle.progress import Progress


def export_drafter(
    folder: Path, pair: "Pair", k: int, destination: Path, force: bool, progress: "Progress"
) -> bool:
    """Export the drafter in `folder`; return whether anything was written.

    Nothing is written if `destination` already holds the same drafter.
    """
    import torch

    from peagle.export.export import export

    with staged_folder(destination) as exported:
        export(load_drafter(folder, pair, progress), exported, "vllm", k, None, torch.bfloat16)
        return publish(exported, destination, force)


def copy_drafter(folder: Path, destination: Path, force: bool) -> bool:
    """Copy the drafter in `folder` as it is; return whether anything was written."""
    with staged_folder(destination) as copied:
        copied.mkdir()
        for file in [folder / "config.json", *folder.glob("*.safetensors")]:
            shutil.copyfile(file, copied / file.name)
        return publish(copied, destination, force)


@contextmanager
def staged_folder(destination: Path) -> Iterator[Path]:
    """The path of a folder to write, beside `destination`."""
    if destination.exists() and not destination.is_dir():
        raise UserError(f"{destination} is a file: choose another `out`")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{destination.name}.", dir=destination.parent
    ) as parent:
        yield Path(parent) / destination.name


def publish(staged: Path, destination: Path, force: bool) -> bool:
    """Move a folder to `destination`; return False if it is there already."""
    if destination.exists() and same_files(staged, destination):
        return False
    if destination.exists() and not force:
        raise UserError(f"{destination} holds another drafter: `force` replaces it")
    replace_folder(staged, destination)
    return True


def subset_notices(folder: Path) -> list[str]:
    """At most one line: the parts of the drafter in `folder` that vLLM does not support."""
    from peagle.drafter.formats.checkpoint import read
    from peagle.export.vllm_subset import subset_notice

    notice = subset_notice(read(folder).config)
    return [] if notice is None else [notice]


def load_drafter(folder: Path, pair: "Pair", progress: "Progress") -> "Drafter":
    """Load the drafter in float32, so that its weights are rounded only once.

    The checkpoints of peagle omit the embeddings: they come from the target, which is fetched.
    """
    from peagle.drafter.formats import checkpoint
    from peagle.loaded import load

    saved = checkpoint.read(folder)
    if saved.format != "peagle" and saved.config.aux_layer_ids is not None:
        return checkpoint.load(folder, None)
    loaded = load(
        pair, drafter=folder, dtype="float32", device="cpu", stored=False, progress=progress
    )
    return loaded.drafter(loaded.pair.method)


def same_files(left: Path, right: Path) -> bool:
    names = sorted(path.name for path in left.iterdir())
    if names != sorted(path.name for path in right.iterdir()):
        return False
    return not any(filecmp.cmpfiles(left, right, names, shallow=False)[1:])
