"""`peagle serve` in a SageMaker container: environment of a deployment, and requests."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from peagle.deploy.sagemaker.plan.artifact import Artifact
from peagle.deploy.sagemaker.plan.environment import CHANNEL_FOLDER
from peagle.deploy.sagemaker.resources.stack import build_stack
from peagle.export.export import export
from tests.support.deploy.aws import deployment, endpoint_settings
from tests.support.models.tiny_models import make_drafter, make_target
from tests.support.server.serving import events, word_tokenizer

HELLO = {"messages": [{"role": "user", "content": "w6 w9 w30"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("container")
    target = make_target()
    target.model.save_pretrained(root / "model")
    word_tokenizer().save_pretrained(root / "model")
    export(make_drafter(target, "p-eagle", 2), root / "eagle", "vllm", 3)
    return {"model": root / "model", "eagle": root / "eagle"}


def variables(folders: dict[str, Path], port: int) -> dict[str, str]:
    """The environment of the container, with local folders and this port."""
    here = {"SM_VLLM_HOST": "127.0.0.1", "SM_VLLM_PORT": str(port), "SM_VLLM_DTYPE": "float32"}
    spec = deployment(k=3, context=128, flags={"enforce-eager": True})
    stack = build_stack(
        endpoint_settings(variables=here), spec, Artifact("t", "0" * 12), Artifact("d", "1" * 12)
    )
    given = stack.resources[0].create.parameters["PrimaryContainer"]["Environment"]
    assert CHANNEL_FOLDER in given["SM_VLLM_SPECULATIVE_CONFIG"]
    local = {
        name: value.replace(CHANNEL_FOLDER, str(folders["eagle"])) for name, value in given.items()
    }
    return local | {"SM_VLLM_MODEL": str(folders["model"])}  # instead of /opt/ml/model


def test_ping_and_invocations(folders: dict[str, Path]) -> None:
    # Bound until the end of the test, so that no other program gets the port.
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    command = [
        sys.executable,
        "-c",
        "from peagle.cli.serving.container import main; main()",
    ]  # the script `serve`
    process = subprocess.Popen(
        command, env=os.environ | variables(folders, port), stderr=subprocess.PIPE, text=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, url)
        answer = httpx.post(f"{url}/invocations", json=HELLO, timeout=60).raise_for_status().json()
        assert (
            answer["model"] == "tiny"
            and answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
        )
        streamed = httpx.post(f"{url}/invocations", json=HELLO | {"stream": True}, timeout=60).text
        pieces = [
            chunk["choices"][0]["delta"].get("content") or ""
            for chunk in events(streamed)
            if chunk["choices"]
        ]
        assert "".join(pieces) == answer["choices"][0]["message"]["content"]
        long = httpx.post(f"{url}/invocations", json=HELLO | {"max_tokens": 500}, timeout=60)
        assert long.status_code == 400 and "128" in long.text, (
            "the server uses the context of the deployment"
        )
        process.terminate()
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0 and "Traceback" not in log
        assert {"ready", "draining", "stopped"} <= {
            json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")
        }
    finally:
        reserved.close()
        process.kill()
        process.wait()


def wait_until_ready(process: "subprocess.Popen[str]", url: str) -> None:
    end = time.monotonic() + 120
    states: list[int] = []
    while time.monotonic() < end and 200 not in states:
        assert process.poll() is None, process.stderr and process.stderr.read()
        try:
            states.append(httpx.get(f"{url}/ping", timeout=2).status_code)
        except httpx.TransportError:
            time.sleep(0.05)
    assert states[-1] == 200 and set(states) <= {503, 200}
