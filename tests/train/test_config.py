"""The flat training config: reading YAML, TOML and --set, validation, and writing every key."""

from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

from peagle.errors import UserError
from peagle.train.config import TrainConfig, read_config, to_yaml

YAML = """
method: eagle3
k: 6
lr: 8e-4
aux_layer_ids: [2, 15, 27]
train_embeddings: true
data: a, b
steps: 1_000
"""
TOML = """
method = "eagle3"
k = 6
lr = 8e-4
aux_layer_ids = [2, 15, 27]
train_embeddings = true
data = "a, b"
"""
EXPECTED = {
    "method": "eagle3",
    "k": 6,
    "lr": 8e-4,
    "aux_layer_ids": (2, 15, 27),
    "train_embeddings": True,
    "data": "a, b",
    "steps": 1000,
}


def write_config(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.toml", TOML + "steps = 1000\n")]
)
def test_yaml_and_toml(tmp_path, name: str, text: str):
    config = read_config(write_config(tmp_path / name, text))
    assert asdict(config) == asdict(TrainConfig()) | EXPECTED
    assert all(type(getattr(config, key)) is type(value) for key, value in EXPECTED.items())


def test_empty_input_gives_the_defaults(tmp_path):
    assert (
        read_config(None)
        == TrainConfig()
        == read_config(write_config(tmp_path / "a.yaml", "# nothing\n"))
    )


def test_set_options_override_the_file(tmp_path):
    texts = {
        "k": "7",
        "lr": "1e-3",
        "remember": "False",
        "aux_layer_ids": "1,3, 5",
        "method": "p-eagle",
        "out": "x",
    }
    config = read_config(write_config(tmp_path / "a.yaml", YAML), texts)
    assert (config.k, config.lr, config.remember, config.aux_layer_ids) == (
        7,
        1e-3,
        False,
        (1, 3, 5),
    )
    assert (config.method, config.out, config.data) == ("p-eagle", "x", "a, b")
    assert read_config(None, {"aux_layer_ids": ""}).aux_layer_ids == ()


def test_an_unknown_key_suggests_the_nearest(tmp_path):
    path = write_config(tmp_path / "a.yaml", "learning_rate: 1\n")
    with pytest.raises(UserError, match=r"unknown key 'learning_rate' in .*a\.yaml"):
        read_config(path)
    with pytest.raises(UserError, match=r"unknown key 'pack_token' in the options.*'pack_tokens'"):
        read_config(None, {"pack_token": "4096"})
    with pytest.raises(UserError, match=r"unknown key 'foo' in the options\. See .*--print-co"):
        read_config(None, {"foo": "1"})


WRONG_TYPES = [
    ("k", "seven"),
    ("k", 2.5),
    ("k", True),
    ("k", None),
    ("k", [1]),
    ("k", "inf"),
    ("lr", "fast"),
    ("lr", False),
    ("remember", 1),
    ("remember", "yes please"),
    ("aux_layer_ids", 3),
    ("aux_layer_ids", "1,x"),
    ("aux_layer_ids", [1.5]),
    ("out", None),
    ("data", ["a", "b"]),
    ("target", True),
]


@pytest.mark.parametrize(("key", "value"), WRONG_TYPES)
def test_wrong_types(key: str, value: object):
    with pytest.raises(UserError, match=f"{key} is .*it must be"):
        read_config(None, {key: value})


WRONG_VALUES = [
    {"method": "none"},
    {"k": 0},
    {"k": 65},
    {"layers": -1},
    {"keep": 0.0},
    {"keep": 1.5},
    {"loss": "l2"},
    {"mix": 2.0},
    {"optimizer": "sgd"},
    {"schedule": "step"},
    {"warmup": 1.0},
    {"dtype": "float16"},
    {"parallel": "tp"},
    {"max_length": 2},
    {"pack_tokens": 100},
    {"packs_per_step": 0},
    {"segments": 0},
    {"log_every": 0},
    {"lr": 0.0},
    {"lr": float("nan")},
    {"epochs": -1.0},
    {"depth_weight": 0.0},
    {"eval_k": -1},
    {"eval_k": 65},
    {"seed": -1},
    {"steps": -1},
    {"held_out": -1},
    {"max_anchors": -1},
    {"draft_vocab": -1},
    {"clip": -1.0},
]


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=str)
def test_wrong_values(wrong: dict):
    (key,) = wrong
    with pytest.raises(UserError, match=f"^{key} is .*it must be"):
        TrainConfig(**wrong)


def test_draft_vocab_minus_one_keeps_that_of_init():
    assert TrainConfig(init="folder", draft_vocab=-1).continues
    with pytest.raises(UserError, match="draft_vocab is -2"):
        TrainConfig(init="folder", draft_vocab=-2)


def test_muon_needs_whole_matrices():
    with pytest.raises(UserError, match=r"muon needs whole matrices.*ddp"):
        TrainConfig(optimizer="muon", parallel="fsdp")


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "k: [1\n", "k: 1\n  lr: 2\n"])
def test_files_without_a_config(tmp_path, text: str):
    path = write_config(tmp_path / "a.yaml", text)
    with pytest.raises(UserError, match=r"a\.yaml"):
        read_config(path)


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(UserError, match="print-config"):
        read_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot read"):
        read_config(tmp_path)
    with pytest.raises(UserError, match="cannot read"):
        read_config(write_config(tmp_path / "a.toml", "k = \n"))


def test_the_logged_k_is_at_most_k_unless_it_is_given():
    assert [read_config(None, {"k": k}).logged_k for k in ("4", "7", "10")] == [4, 7, 7]
    assert read_config(None, {"k": "4", "eval_k": "6"}).logged_k == 6


LONG = ", ".join(f"a folder/with words {i}: and # signs" for i in range(12))


@pytest.mark.parametrize(
    "data", ["", "plain", LONG, "'quoted' \"twice\"", "yes", "1e5", "tab\tand\nline"]
)
def test_yaml_round_trip(tmp_path, data: str):
    config = TrainConfig(
        data=data, aux_layer_ids=(2, 5, 9), remember=False, lr=1.5e-5, target="~/models/x"
    )
    assert read_config(write_config(tmp_path / "a.yaml", to_yaml(config))) == config


def test_yaml_has_every_key_and_its_doc():
    text = to_yaml(TrainConfig())
    assert list(yaml.safe_load(text)) == [f.name for f in fields(TrainConfig)]
    for f in fields(TrainConfig):
        assert f.metadata["doc"] in text
