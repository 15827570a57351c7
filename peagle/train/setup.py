"""The data of a run, and what a capture decides about its config."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from peagle.catalog import DEFAULT_PAIR, find_pair
from peagle.data.records import Report, ignore
from peagle.drafter.formats import checkpoint
from peagle.errors import UserError
from peagle.target import Target
from peagle.train.config import TrainConfig
from peagle.train.data.documents import Documents, join_some, read_documents, split_held_out
from peagle.train.data.vocabulary import (
    DraftVocabulary,
    choose_draft_vocabulary,
    given_draft_vocabulary,
)
from peagle.train.features.shards import CAPTURE_FILE, read_capture_record, read_target_record
from peagle.train.features.stored import StoredTarget


@dataclass(frozen=True, slots=True)
class TrainingData:
    documents: Documents
    held_out: Documents
    target_ids: Tensor | None  # the draft vocabulary; None is the whole vocabulary
    coverage: float  # fraction of the answers' tokens in it


def load_training_data(
    config: TrainConfig, target: Target, report: Report = ignore
) -> TrainingData:
    if not config.data:
        raise UserError(
            "there is no data: set `data` to a folder of `peagle regenerate` or a JSONL file of"
            " conversations"
        )
    length = min(config.max_length, target.context)
    if isinstance(target, StoredTarget):
        if config.joined:
            raise UserError("a capture holds the features of its documents: leave out joined")
        documents = target.shards.documents(length)
    else:
        paths = [Path(part.strip()) for part in config.data.split(",")]
        documents = read_documents(paths, target, length, report)
    train, held_out = split_held_out(documents, config.held_out, config.seed)
    if config.joined:
        train = join_some(train, config.joined, length, config.seed)
    vocabulary = _draft_vocabulary(config, target, train)
    return TrainingData(train, held_out, vocabulary.target_ids, vocabulary.coverage)


def _draft_vocabulary(config: TrainConfig, target: Target, documents: Documents) -> DraftVocabulary:
    if config.draft_vocab >= 0:
        return choose_draft_vocabulary(
            documents, target.vocab_size, config.draft_vocab, target.stop_ids
        )
    return given_draft_vocabulary(documents, earlier_vocabulary(config, target))


def earlier_vocabulary(config: TrainConfig, target: Target) -> Tensor | None:
    """The draft vocabulary of the drafter in `init`; None: all tokens."""
    ids = checkpoint.load(Path(config.init).expanduser(), target).target_ids
    return None if ids is None else ids.cpu()


def find_capture(data: str) -> Path | None:
    """The folder of a capture, if `data` names one."""
    paths = [Path(part.strip()).expanduser() for part in data.split(",") if part.strip()]
    captures = [path for path in paths if (path / CAPTURE_FILE).is_file()]
    if captures and len(paths) > 1:
        raise UserError(
            f"{captures[0]} is a capture, which is trained from alone: give it as the only `data`,"
            " or run `peagle capture` once over all data folders"
        )
    return captures[0] if captures else None


def apply_capture(config: TrainConfig) -> TrainConfig:
    """The config with the target and the taps of its capture, if its data is one."""
    folder = find_capture(config.data)
    if folder is None:
        return config
    target = read_target_record(folder)
    capture = read_capture_record(folder)
    ids = tuple(capture.aux_layer_ids)
    if not set(config.aux_layer_ids) <= set(ids):
        raise UserError(
            f"aux_layer_ids are {config.aux_layer_ids}, but {folder} holds those of {ids}:"
            " use these"
        )
    known_names = (DEFAULT_PAIR, target.name)
    if config.target not in known_names and hub_name(config.target) != target.name:
        raise UserError(
            f"{folder} was captured from {target.name}, not from {config.target}:"
            f" set target to {target.name}"
        )
    if config.init == "target" and config.num_layers > target.blocks:
        raise UserError(
            f"{folder} holds the target's last {target.blocks} blocks, but layers is"
            f" {config.num_layers}: use init = random"
        )
    if config.context and capture.context not in (None, config.context):
        raise UserError(
            f"{folder} was captured for a context of {capture.context} tokens, not of"
            f" {config.context}: leave out context, or capture again"
        )
    return replace(config, target=target.name, aux_layer_ids=config.aux_layer_ids or ids)


def hub_name(target: str) -> str:
    """The hub id of a pair's target; any other name stays as it is."""
    try:
        pair = find_pair(target)
    except UserError:
        return target
    return pair.target.hub or pair.name
