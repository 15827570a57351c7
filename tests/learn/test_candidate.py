"""The candidate of a round is judged with exactly the weights that are stored and served."""

from pathlib import Path

import torch

from peagle.drafter.formats import checkpoint
from peagle.learn.training.candidate import mix_weights, save_candidate
from tests.support.drafter_versions import other_version
from tests.support.learning import tiny_teacher


def test_stored_weights_are_those_that_were_judged(tmp_path: Path) -> None:
    teacher = tiny_teacher()
    current = checkpoint.load(teacher.drafter, teacher.target, torch.float32)
    trained = other_version(current, teacher.target, noise=0.01)
    trained.config = current.config
    mixed = mix_weights(current, trained, 0.7)
    save_candidate(mixed, tmp_path / "0001", teacher.target)
    served = checkpoint.load(tmp_path / "0001", teacher.target, torch.float32).state_dict()
    for name, tensor in mixed.state_dict().items():
        assert torch.equal(tensor, served[name]), name
        expected = torch.lerp(current.state_dict()[name], trained.state_dict()[name], 0.7)
        assert torch.allclose(tensor, expected, rtol=0.01)
