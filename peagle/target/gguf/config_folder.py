"""Config and tokenizer of a GGUF file, in the files that transformers reads.

transformers takes 10 seconds to read them from the file of a small model, because it reads the
vocabulary three times. So the result is kept in the cache folder, under the digest of the header.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from peagle.errors import UserError
from peagle.paths import cache_home, publish_folder
from peagle.target.gguf.header import GGUFHeader
from peagle.target.gguf.pre_tokenizer import correct_splitting
from peagle.target.loading_error import loading_reason

FOLDER_VERSION = 3  # of what is written here
# Tokens that end an answer: of the text, of a turn, and of a message that calls a tool.
STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
LAYER_BIAS = re.compile(r"blk\.\d+\.(attn_[qkv]|attn_output|ffn_(gate|up|down))\.bias")


def config_folder(header: GGUFHeader) -> Path:
    """The folder with the config and the tokenizer of this file, written at the first call."""
    folder = cache_home() / "gguf" / f"{header.digest[:32]}-{FOLDER_VERSION}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            if not folder.exists():
                with publish_folder(folder) as staging:
                    convert_checked(header, staging)
    return folder


def convert_checked(header: GGUFHeader, folder: Path) -> None:
    """convert_config, with an error of ours if transformers cannot read the file."""
    try:
        convert_config(header, folder)
    except UserError:
        raise
    except Exception as error:  # transformers raises exceptions of any type
        raise UserError(
            f"cannot read config and tokenizer of {header.path} (architecture"
            f" {header.architecture!r}): {loading_reason(error)}"
        ) from error


@contextmanager
def location(file: Path) -> Iterator[dict[str, Any]]:
    """Arguments with which transformers reads a local GGUF file.

    It gets a folder in which the file is alone: it would mix in the tokenizer files beside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).symlink_to(file.resolve())
        yield {
            "pretrained_model_name_or_path": folder,
            "gguf_file": file.name,
            "local_files_only": True,
        }


def convert_config(header: GGUFHeader, folder: Path, digits_split: bool = False) -> None:
    """Fill `folder` with config.json, generation_config.json and the tokenizer.

    `digits_split`: split digits in any case, not only if the file says so.
    """
    with location(header.path) as source:
        config: Any = AutoConfig.from_pretrained(**source, trust_remote_code=False)
    config.tie_word_embeddings = "output.weight" not in header.tensors
    head_dim = header.metadata.get(f"{header.architecture}.attention.key_length")
    if head_dim is not None and hasattr(config, "head_dim"):
        config.head_dim = head_dim  # which transformers does not read of every architecture
    set_biases(config, header)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    generation = GenerationConfig(
        eos_token_id=stop_ids(config, header), bos_token_id=config.bos_token_id
    )
    generation.save_pretrained(folder)
    if "tokenizer.ggml.model" in header.metadata:
        save_tokenizer(header, config, folder, digits_split)


def stop_ids(config: Any, header: GGUFHeader) -> int | list[int] | None:
    """The tokens that end an answer, of which transformers reads one."""
    own = config.eos_token_id
    ids = [own] if isinstance(own, int) else list(own or [])
    for key in STOP_KEYS:
        token = header.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token, int) and token not in ids and 0 <= token < config.vocab_size:
            ids.append(token)
    return ids if len(ids) > 1 else (ids or [None])[0]


def set_biases(config: Any, header: GGUFHeader) -> None:
    """Llama files may have biases; only their tensors tell."""
    if header.architecture != "llama":
        return
    biases = {name.split(".")[2] for name in header.tensors if LAYER_BIAS.fullmatch(name)}
    for option, part in (("attention_bias", "attn_"), ("mlp_bias", "ffn_")):
        if hasattr(config, option):
            setattr(config, option, any(name.startswith(part) for name in biases))


def save_tokenizer(header: GGUFHeader, config: Any, folder: Path, digits_split: bool) -> None:
    """Save the tokenizer of a GGUF file with its faults corrected.

    Those are the stop token, the clean-up of spaces, and where text is split before merges.
    """
    with location(header.path) as source:
        tokenizer: Any = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    correct_splitting(tokenizer, header, digits_split)
    stop = config.eos_token_id
    if stop is not None:
        stop_id = stop[0] if isinstance(stop, list) else stop
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop_id)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
