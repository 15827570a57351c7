"""What `peagle serve` checks before it starts a process."""

from pathlib import Path

from peagle.learn.folder import LearnFolder
from peagle.server.settings import ServerSettings


def check_folders(settings: ServerSettings) -> None:
    """UserError: a folder of the settings cannot be used. Nothing is loaded."""
    if settings.learn is not None:
        LearnFolder(Path(settings.learn)).require_writable()
