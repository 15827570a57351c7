"""A tiny pair on disk, and versions of its drafter in a learn folder."""

from pathlib import Path

import torch

from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact
from peagle.learn.folder import LearnFolder
from peagle.learn.versions import VersionRecord, drafter_digest, version_folder, write_version
from peagle.loaded import LoadedPair, load_with_drafters


def load_folder(root: Path) -> LoadedPair:
    """Load the pair that `tiny_folder` saves."""
    drafter = str(root / "p-eagle")
    return load_with_drafters(str(root / "target"), None, drafter, "cpu", "float32")


def changed_drafter(pair: LoadedPair, root: Path, seed: int) -> Drafter:
    """Save the drafter with other weights, as if it had been trained."""
    drafter = checkpoint.load(root / "p-eagle", pair.target, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return drafter


def add_version(
    folder: LearnFolder, pair: LoadedPair, root: Path, number: int, parent: int, base: str = ""
) -> None:
    """Write a version of the drafter; `base`: the digest of another drafter."""
    drafter = changed_drafter(pair, root, seed=number)
    compact.save(drafter, version_folder(folder, number), pair.target)
    base = base or drafter_digest(root / "p-eagle")
    record = VersionRecord(number, parent, 1.0, "p-eagle", base, "promoted", "a test")
    write_version(folder, record)
