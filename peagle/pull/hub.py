"""A target or a drafter from the Hugging Face hub. Interrupted downloads continue where they stopped."""

import shutil
from pathlib import Path

import httpx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import disable_progress_bars

from peagle.catalog.pair import Pair
from peagle.errors import UserError
from peagle.paths import cache_home
from peagle.progress import Progress, watched

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no pickles


def fetch(pair: Pair, staging: Path, progress: Progress) -> str:
    assert pair.target.hub is not None
    return download(pair.target.hub, pair.target.revision, f"{pair.name}.hub", staging, progress)


def download(repo: str, revision: str | None, name: str, staging: Path, progress: Progress) -> str:
    """Fills `staging` and returns the commit. `name`: of the folder that keeps what came so far."""
    partial = cache_home() / "downloads" / name
    disable_progress_bars()  # we draw our own
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=20)
        wanted = [s for s in info.siblings or [] if any(Path(s.rfilename).match(p) for p in FILES)]
        total = sum(s.size or 0 for s in wanted)
        with watched(partial, f"{repo} from the hub", total, progress):
            snapshot_download(repo, revision=info.sha, local_dir=partial, allow_patterns=FILES)
    except (httpx.HTTPError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{repo} cannot be had from the hub ({reason}); check the connection or HF_ENDPOINT"
        ) from error
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    for file in partial.iterdir():
        shutil.move(file, staging / file.name)
    partial.rmdir()
    return str(info.sha)
