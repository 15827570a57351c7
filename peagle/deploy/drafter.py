"""A drafter that lies on this machine, as vLLM reads it, beside the files that mount it."""

import filecmp
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.errors import UserError
from peagle.paths import replace_folder

if TYPE_CHECKING:
    from peagle.catalog.pair import Pair
    from peagle.progress import Progress


def export_drafter(
    folder: Path, pair: "Pair", k: int, final: Path, force: bool, progress: "Progress"
) -> bool:
    """Was anything written? The same drafter exported again changes nothing."""
    import torch

    from peagle.export.export import export

    if final.exists() and not final.is_dir():
        raise UserError(f"{final} is a file: choose another --out")
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent) as beside:
        made = Path(beside) / final.name
        export(load_drafter(folder, pair, progress), made, "vllm", k, None, torch.bfloat16)
        if final.exists() and same(made, final):
            return False
        if final.exists() and not force:
            raise UserError(f"{final} holds another drafter: --force replaces it")
        replace_folder(made, final)
    return True


def lost(folder: Path) -> list[str]:
    """What vLLM does not serve of the drafter in this folder: a line, or none."""
    from peagle.drafter.formats.checkpoint import read
    from peagle.export.vllm_subset import subset_notice

    line = subset_notice(read(folder).config)
    return [] if line is None else [line]


def load_drafter(folder: Path, pair: "Pair", progress: "Progress"):  # type: ignore[no-untyped-def]
    """In float32, so that nothing is rounded twice. Ours leave embeddings to their target, which is fetched then."""
    from peagle.drafter.formats import checkpoint
    from peagle.loaded import load

    found = checkpoint.read(folder)
    if found.format != "peagle" and found.config.aux_layer_ids is not None:
        return checkpoint.load(folder, None)
    loaded = load(pair, drafter=folder, dtype="float32", device="cpu", progress=progress)
    return loaded.drafter(loaded.pair.method)


def same(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    if names != sorted(path.name for path in other.iterdir()):
        return False
    return not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])
