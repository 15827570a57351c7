"""RoundSettings: when a round of training begins, how it trains, and what a candidate must win by.

A round trains the current drafter on new and replayed documents and judges the candidate. DIR may
have a file training.json with some of these fields; all others have their defaults.
"""

import json
from dataclasses import dataclass, fields

from peagle.errors import UserError, did_you_mean
from peagle.learn.folder import LearnFolder

SETTINGS_FILE = "training.json"


@dataclass(frozen=True, slots=True)
class RoundSettings:
    min_documents: int = 64  # new documents that start a round, held-back ones not counted
    max_tokens: int = 400_000  # of new and older documents of the store in a round
    replay_share: float = 0.3  # fraction of a round's tokens from the replay folder
    pack_tokens: int = 0  # longer documents are cut to it; 0: 4096 on a GPU, 1024 on a CPU
    epochs: float = 2.0
    optimizer: str = "adamw"
    lr: float = 3e-4
    save_seconds: float = 60.0  # between two states of a round
    k: int = 7  # drafts of the chains that are judged
    min_held_back: int = 20  # documents
    max_held_back: int = 100  # the newest ones judge
    margin: float = 0.01  # by which the lower bound of the ratio must exceed 1
    min_replay_ratio: float = 0.98  # of version 0's length on held-out answers of the replay
    # Shares of the trained weights, tried in this order; the rest is the current weights.
    mixes: tuple[float, ...] = (0.5, 0.3)
    seed: int = 0
    nice: int = 19  # priority of the job; 19 is the lowest

    def __post_init__(self) -> None:
        positive = ("min_documents", "max_tokens", "epochs", "lr", "k", "min_held_back")
        for name in positive:
            if getattr(self, name) <= 0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be above 0")
        if not 0 <= self.replay_share < 1:
            raise UserError(f"replay_share is {self.replay_share}: it must be in [0, 1)")
        if not self.mixes or not all(0 < mix <= 1 for mix in self.mixes):
            raise UserError(f"mixes are {list(self.mixes)}: give shares in (0, 1]")


def read_round_settings(folder: LearnFolder) -> RoundSettings:
    path = folder.root / SETTINGS_FILE
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        return RoundSettings()
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold keys and values")
    known = [field.name for field in fields(RoundSettings)]
    for key in values:
        if key not in known:
            raise UserError(f"unknown key {key!r} in {path}.{did_you_mean(key, known)}")
    try:
        if "mixes" in values:
            values["mixes"] = tuple(values["mixes"])
        return RoundSettings(**values)
    except TypeError as error:
        raise UserError(f"cannot read {path}: {error}") from error
