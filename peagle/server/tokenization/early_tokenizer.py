"""EarlyTokenizer: loads the target's tokenizer while the engine process still starts."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from peagle.catalog.catalog import find_pair, pair_names
from peagle.server.settings import ServerSettings
from peagle.target.tokenizer import import_without_torch, load_tokenizer_without_torch


class EarlyTokenizer:
    def __init__(self, settings: ServerSettings) -> None:
        self._name = settings.target or settings.pair
        self._folder: Path | None = None
        self._tokenizer: Any = None
        self._thread = threading.Thread(target=self._load, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load(self, folder: Path) -> Any:
        """The tokenizer of the folder that the engine process has loaded its target from."""
        if self._thread.ident is not None:
            self._thread.join()
        tokenizer, self._tokenizer = self._tokenizer, None  # The folder may change until a restart.
        if tokenizer is not None and self._folder == folder:
            return tokenizer
        return load_tokenizer_without_torch(folder)

    def _load(self) -> None:
        import_without_torch()
        with suppress(Exception):  # What fails here fails again, and is reported, in `load`.
            folder = local_target(self._name)
            if folder is not None:
                self._tokenizer = load_tokenizer_without_torch(folder)
                self._folder = folder


def local_target(name: str) -> Path | None:
    """The folder of a target that is complete on this machine; None: it is not known yet."""
    from peagle.pull import receipt, target_folder

    folder = Path(name).expanduser()
    if name in pair_names():
        folder = target_folder(find_pair(name))
        if receipt(folder) is None:
            return None
    return folder.resolve() if (folder / "config.json").is_file() else None
