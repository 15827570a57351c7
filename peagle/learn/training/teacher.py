"""The pair as the trainer loads it: the target with its own weights, and the drafter's folder."""

from dataclasses import dataclass
from pathlib import Path

import torch

from peagle.catalog import find_pair
from peagle.errors import UserError
from peagle.learn.folder import LearnFolder, StoreIdentity, target_identity
from peagle.learn.settings import LearnerSettings
from peagle.learn.versions import drafter_digest, read_current, version_folder
from peagle.model_pair import choose_device, load_models
from peagle.pull import pull, pull_drafter
from peagle.target import Target


@dataclass(frozen=True, slots=True)
class Teacher:
    target: Target
    identity: StoreIdentity
    drafter: Path  # folder of version 0
    base: str  # digest of that drafter

    def version(self, folder: LearnFolder, number: int) -> Path:
        """The drafter folder of a version."""
        return version_folder(folder, number) if number else self.drafter

    def current(self, folder: LearnFolder) -> Path:
        return self.version(folder, read_current(folder).number)


def load_teacher(settings: LearnerSettings) -> Teacher:
    """Load the target: in bfloat16 on a GPU, in the faster one of both types on a CPU."""
    device = choose_device(settings.device)
    on_gpu = device.startswith("cuda")
    if on_gpu and settings.memory_gib:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings.memory_gib * 2**30 / total))
    target = load_models(
        settings.pair,
        target=settings.target,
        device=device,
        dtype="bfloat16" if on_gpu else "auto",
        context=settings.context,
        stored=False,
    ).target
    folder = drafter_folder(settings)
    return Teacher(target, pair_identity(settings, target), folder, drafter_digest(folder))


def drafter_folder(settings: LearnerSettings) -> Path:
    """The folder of the drafter that the pair ships, version 0."""
    if settings.drafter:
        return Path(settings.drafter).expanduser()
    pair = find_pair(settings.pair)
    method = settings.method or pair.method
    folder = pull_drafter(pair, method)
    if folder is None:
        raise UserError(
            f"the pair {pair.name} has no trained {method} drafter to continue:"
            " train one with `peagle make-drafter`"
        )
    return folder


def pair_identity(settings: LearnerSettings, target: Target) -> StoreIdentity:
    source = find_pair(settings.target or settings.pair)
    return target_identity(pull(source), str(target.name), target.revision, target.vocab_size)
