"""The tokenizer of a target, loaded by transformers; with or without torch.

transformers imports torch wherever it is installed: 400 MB and seconds in each process. Tokenizers
and chat templates do not need it, so that a process that only handles text imports transformers as
if torch were not installed. The code that tokenizes is the same.
"""

import logging
import os
import sys
from pathlib import Path
from threading import Lock
from typing import Any

from peagle.target.transformers_import import quick_imports

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_import_lock = Lock()


def load_tokenizer(folder: Path) -> Any:
    """None if the folder has no tokenizer."""
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_tokenizer_without_torch(folder: Path) -> Any:
    """The same as `load_tokenizer`; with torch if it is loaded already or the tokenizer needs it.

    For processes that load no model: transformers refuses to, once it was imported without torch.
    """
    import_without_torch()
    try:
        return load_tokenizer(folder)
    except Exception:  # An error for want of torch may have any type.
        if "torch" in sys.modules:
            raise
        forget_transformers()
        return load_tokenizer(folder)


def import_without_torch() -> None:
    """Import transformers' tokenizers as if torch were not installed, unless torch is loaded."""
    # Texts come one at a time: passing each to a thread of tokenizers only takes time.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with _import_lock:
        if "torch" not in sys.modules and "transformers" not in sys.modules:
            _import_hiding_torch()
        with quick_imports():
            from transformers import AutoTokenizer  # noqa: F401


def _import_hiding_torch() -> None:
    # transformers warns that it has no models without torch.
    logger = logging.getLogger("transformers")
    logger.disabled = True
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python: it cannot be imported.
    try:
        with quick_imports():
            from transformers.utils import is_torch_available

        is_torch_available()  # Cached from now on.
    finally:
        del sys.modules["torch"]
        logger.disabled = False


def forget_transformers() -> None:
    """Let the next import of transformers look for torch again."""
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        del sys.modules[name]
