"""What `peagle deploy` renders, read by vLLM's own parser: its options, and a config file that says the same."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: run `make test-vllm`")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.deploying import KEYS, KINDS, PAIRS, documents, planned, rendered, words_of

pytestmark = pytest.mark.vllm


def parsed(words: list[str]) -> AsyncEngineArgs:
    parser = make_arg_parser(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", words[0], *words[1:]]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ray"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_command(kind: str, pair: str) -> None:
    choices = {"gpus": 2, "gpu": "H100"}
    said, made = parsed(words_of(kind, rendered(kind, pair, choices=choices))), planned(kind, pair, choices=choices)
    assert set(said.speculative_config) == KEYS
    assert said.speculative_config["num_speculative_tokens"] == made.k
    assert (said.model, said.tensor_parallel_size, said.max_model_len) == (made.target, 2, made.context)
    assert said.served_model_name in (pair, [pair])


def test_the_config_file(tmp_path: Path) -> None:
    files = rendered("vllm")
    (tmp_path / "config.yaml").write_text(files["config.yaml"])
    parser = make_arg_parser(FlexibleArgumentParser())
    words = parser.load_config_file(str(tmp_path / "config.yaml"))
    assert AsyncEngineArgs.from_cli_args(parser.parse_args(words)) == parsed(words_of("vllm", files))


@pytest.mark.parametrize("pair", PAIRS)
def test_rays_keywords_are_the_engines(pair: str) -> None:
    config: dict[str, Any] = documents(rendered("ray", pair))["serve.yaml"]["applications"][0]["args"]["llm_configs"][0]
    assert AsyncEngineArgs(model="x", **config["engine_kwargs"]).tensor_parallel_size == 1


def test_the_parser_is_strict() -> None:
    with pytest.raises(SystemExit):
        parsed(["a/b", "--speculative-confg={}"])


def test_probes_ask_for_paths_that_there_are() -> None:
    from vllm.entrypoints.serve.instrumentator.health import router

    assert "/health" in {route.path for route in router.routes}
