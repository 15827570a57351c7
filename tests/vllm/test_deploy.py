"""The options and the config file of `peagle deploy` are parsed by vLLM."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: run `make test-vllm`")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from peagle.deploy.drafter import export_drafter
from peagle.deploy.options import DeployOptions
from peagle.deploy.plan import plan
from peagle.deploy.render import changed_files, render, write_files
from peagle.progress import silent
from tests.support.deploy.deploying import (
    KEYS,
    KINDS,
    PAIRS,
    documents,
    planned,
    rendered,
    vllm_arguments,
)
from tests.vllm.starting import wait_until_ready

pytestmark = pytest.mark.vllm
REAL_TARGET = os.environ.get("PEAGLE_REAL_TARGET", "")
REAL_DRAFTER = os.environ.get("PEAGLE_REAL_DRAFTER", "")
KEY = {"Authorization": "Bearer of-no-value"}


def parsed(words: list[str]) -> AsyncEngineArgs:
    parser = make_arg_parser(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", words[0], *words[1:]]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ray"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_command_is_valid(kind: str, pair: str) -> None:
    choices = {"gpus": 2, "gpu": "H100"}
    arguments = parsed(vllm_arguments(kind, rendered(kind, pair, **choices)))
    deployment = planned(kind, pair, **choices)
    assert set(arguments.speculative_config) == KEYS
    assert arguments.speculative_config["num_speculative_tokens"] == deployment.k
    assert arguments.model == deployment.target
    assert arguments.tensor_parallel_size == 2
    assert arguments.max_model_len == deployment.context
    assert arguments.served_model_name in (pair, [pair])


def test_the_config_file_is_valid(tmp_path: Path) -> None:
    files = rendered("vllm")
    (tmp_path / "config.yaml").write_text(files["config.yaml"])
    parser = make_arg_parser(FlexibleArgumentParser())
    words = parser.load_config_file(str(tmp_path / "config.yaml"))
    assert AsyncEngineArgs.from_cli_args(parser.parse_args(words)) == parsed(
        vllm_arguments("vllm", files)
    )


@pytest.mark.parametrize("pair", PAIRS)
def test_engine_keywords_for_ray_are_valid(pair: str) -> None:
    config: dict[str, Any] = documents(rendered("ray", pair))["serve.yaml"]["applications"][0][
        "args"
    ]["llm_configs"][0]
    assert AsyncEngineArgs(model="x", **config["engine_kwargs"]).tensor_parallel_size == 1


def test_the_parser_is_strict() -> None:
    with pytest.raises(SystemExit):
        parsed(["a/b", "--speculative-confg={}"])


def test_probes_use_existing_paths() -> None:
    from vllm.entrypoints.serve.instrumentator.health import router

    assert "/health" in {route.path for route in router.routes}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the generated serve.sh with the real pair and the `vllm` of this environment."""
    if not (REAL_TARGET and REAL_DRAFTER):
        pytest.skip("PEAGLE_REAL_TARGET and PEAGLE_REAL_DRAFTER name no pair")
    out = tmp_path_factory.mktemp("deployed")
    planned = plan(
        REAL_TARGET,
        "vllm",
        DeployOptions(drafter=REAL_DRAFTER, context=1024, served_model_name="pair"),
    )
    assert planned.drafter_folder is not None
    write_files(changed_files(render("vllm", planned.deployment), out, force=False))
    export_drafter(
        planned.drafter_folder, planned.pair, planned.deployment.k, out / "drafter", False, silent
    )
    (out / "bin").mkdir()
    server = f"{sys.executable} -m vllm.entrypoints.openai.api_server"
    shim = f'#!/bin/sh\nshift\nexec {server} --model "$@"\n'
    (out / "bin" / "vllm").write_text(shim)
    (out / "bin" / "vllm").chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = {
        "PATH": f"{out / 'bin'}:{os.environ['PATH']}",
        "PORT": str(port),
        "VLLM_API_KEY": "of-no-value",
    }
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with (out / "log").open("w") as log:
        process = subprocess.Popen(
            [out / "serve.sh", "--enforce-eager"],
            env=os.environ | ours | cpu,
            stdout=log,
            stderr=log,
        )
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}/health", out / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def test_the_script_serves_the_pair(url: str) -> None:
    body = {
        "model": "pair",
        "messages": [{"role": "user", "content": "Count from 1 to 20."}],
        "max_tokens": 64,
    }
    assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 401
    response = httpx.post(
        f"{url}/v1/chat/completions", json=body | {"temperature": 0}, headers=KEY, timeout=300
    )
    assert response.raise_for_status().json()["usage"]["completion_tokens"] > 8
    counted = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("vllm:spec_decode_num_"):
            counted[line.split("{")[0]] = float(line.split()[-1])
    drafts = counted["vllm:spec_decode_num_drafts_total"]
    assert drafts > 0
    assert counted["vllm:spec_decode_num_draft_tokens_total"] == 7 * drafts
    assert counted["vllm:spec_decode_num_accepted_tokens_total"] > drafts / 2
