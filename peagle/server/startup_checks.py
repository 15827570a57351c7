"""What `peagle serve` checks before it starts a process: the pair's name, and the folders given.

Engine processes find the same faults, but only after they have started and imported torch.
"""

import os
from pathlib import Path

from peagle.catalog import find_pair
from peagle.errors import UserError
from peagle.learn.folder import LearnFolder
from peagle.paths import require_drafter_folder
from peagle.server.settings import ServerSettings


def check_sources(settings: ServerSettings) -> None:
    """UserError: a name is unknown, or a folder cannot be used. Nothing is loaded."""
    find_pair(settings.pair)
    if settings.target:
        find_pair(settings.target)
    for folder in drafter_folders(settings):
        require_drafter_folder(folder)
    replay = settings.learn_replay
    if replay is not None and not os.path.exists(os.path.expanduser(replay)):
        raise UserError(
            f"there is no {replay}: give `learn_replay` a folder of `peagle regenerate`"
        )
    if settings.learn is not None:
        LearnFolder(Path(settings.learn)).require_writable()


def drafter_folders(settings: ServerSettings) -> list[Path]:
    """The native engine takes folders separated by commas, vLLM takes one."""
    if settings.drafter is None:
        return []
    names = [settings.drafter] if settings.engine == "vllm" else settings.drafter.split(",")
    return [Path(os.path.expanduser(name.strip())) for name in names]
