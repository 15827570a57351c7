"""Training on a GPU gives the losses of a CPU: compiled, with flex attention and packed or cached
features.
"""

from pathlib import Path

import pytest
import torch

from peagle.core import Method
from peagle.train.data.batch_transfer import flatten
from peagle.train.data.chains import NO_CHAINS
from peagle.train.data.pack import BatchLayout, build_batch
from peagle.train.features.features import CachedFeatures, FeatureExtractor
from peagle.train.journal import Journal
from peagle.train.optim.parallel import World
from peagle.train.records import StepRecord
from peagle.train.setup import load_training_data
from peagle.train.trainer import Trainer
from tests.support.models.tiny_models import AUX, make_target
from tests.support.train.training import EXTENSIONS, some_config, some_pack, write_answers

pytestmark = pytest.mark.gpu


def losses(
    tmp_path: Path, device: str, method: Method, **more: object
) -> tuple[list[float], Trainer]:
    target = make_target()
    answers = write_answers(target, tmp_path / "answers.jsonl", 30)
    target.model.to(device)
    config = some_config(
        answers, tmp_path / device, method=method, max_anchors=64, steps=10, **more
    )
    trainer = Trainer(config, target, load_training_data(config, target), World())
    journal = Journal(trainer.out)
    assert trainer.train(journal, lambda *_: None)
    return [record.loss for record in journal.records if isinstance(record, StepRecord)], trainer


LONG = {"sliding_window": 64, "joined": 1.0, "loss": "lk"}
VARIANTS = [{}, {"optimizer": "muon"}, {"segments": 2}, {"compile": False}, LONG]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        *((method, variant) for method in ("p-eagle", "eagle3") for variant in VARIANTS),
        *(("p-eagle", extension) for extension in EXTENSIONS.values()),
    ],
    ids=str,
)
def test_gpu_equals_cpu(method: Method, more: dict, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    cpu, _ = losses(tmp_path, "cpu", method, **more)
    gpu, trainer = losses(tmp_path, "cuda", method, **more)
    assert isinstance(trainer.features, CachedFeatures) and trainer.features.cached.any()
    torch.testing.assert_close(torch.tensor(gpu), torch.tensor(cpu), rtol=5e-3, atol=1e-4)


def test_packed_features_equal_padded_ones() -> None:
    target = make_target()
    target.model.to("cuda")
    packed = some_pack(((300, 40), (1, 0), (200, 100), (131, 3), (2, 0)))
    batch = flatten(build_batch(packed, NO_CHAINS, BatchLayout(flex=True))).to("cuda")
    total = int(packed.lengths.sum())
    padded = FeatureExtractor(target, AUX)(batch)
    features = FeatureExtractor(target, AUX, packed=True)
    for mine, theirs in zip(features(batch), padded, strict=True):
        torch.testing.assert_close(mine[:total], theirs[:total], rtol=1e-3, atol=1e-3)
    features.release()
    assert torch.equal(FeatureExtractor(target, AUX)(batch).taps[:total], padded[0][:total])
