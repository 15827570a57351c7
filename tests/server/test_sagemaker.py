"""The environment of a SageMaker container, and vLLM's speculative config."""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from peagle.cli import app
from peagle.cli.serving.container import main
from peagle.errors import UserError
from peagle.server import run
from peagle.server.sagemaker import FLAG_OPTIONS, VALUE_OPTIONS, serve_arguments
from peagle.server.settings import ServerSettings
from peagle.server.speculative import SpeculativeConfig, parse_speculative_config

BASE = ["--host", "0.0.0.0", "--port", "8080"]
JUMPSTART = (
    '{"model":"/opt/ml/additional-model-data-sources/eagle","method":"eagle3",'
    '"num_speculative_tokens":3,"parallel_drafting":true}'
)


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_variables_become_options(tmp_path: Path) -> None:
    given = {
        "SM_VLLM_MODEL": "some/model",
        "SM_VLLM_MAX_MODEL_LEN": "8192",
        "SM_VLLM_ENFORCE_EAGER": "true",
        "SM_VLLM_INT8": "",
        "SM_VLLM_EXACT": "false",
        "SM_VLLM_SERVED_MODEL_NAME": '["a", "b"]',
        "SM_VLLM_SPECULATIVE_CONFIG": JUMPSTART,
        "SM_VLLM_GPU_MEMORY_UTILIZATION": "0.9",
        "PATH": "/bin",
        "SM_VLLM_NO_ENABLE_PREFIX_CACHING": "true",
    }
    assert serve_arguments(given, tmp_path) == [
        *BASE,
        "--model",
        "some/model",
        "--enforce-eager",
        "--no-exact",
        "--int8",
        "--max-model-len",
        "8192",
        "--no-enable-prefix-caching",
        "--served-model-name",
        "a",
        "--served-model-name",
        "b",
        "--speculative-config",
        JUMPSTART,
    ]


@pytest.mark.parametrize(
    ("value", "options"),
    [("True", ["--exact"]), ("1", ["--exact"]), ("False", ["--no-exact"]), ("0", ["--no-exact"])],
)
def test_values_of_boolean_variables(value: str, options: list[str], tmp_path: Path) -> None:
    assert serve_arguments({"SM_VLLM_EXACT": value}, tmp_path) == [*BASE, *options]
    assert serve_arguments({"SM_VLLM_NO_EXACT": value}, tmp_path) == [
        *BASE,
        *(["--no-exact"] if options == ["--exact"] else []),
    ]


@pytest.mark.parametrize("flag", ["ngram", "enable-prefix-caching"])
def test_false_turns_a_default_off(flag: str, tmp_path: Path) -> None:
    name = f"SM_VLLM_{flag.upper().replace('-', '_')}"
    assert serve_arguments({name: "false"}, tmp_path) == [*BASE, f"--no-{flag}"]


def test_invalid_boolean_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"SM_VLLM_EXACT is 'maybe': set it to true or false"):
        serve_arguments({"SM_VLLM_EXACT": "maybe"}, tmp_path)


def test_flags_that_turn_off_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SM_VLLM_NO_EXACT": "true", "SM_VLLM_NO_NGRAM": ""}
    assert serve_arguments(variables, tmp_path) == [*BASE, "--no-exact", "--no-ngram"]
    got = settings_of(monkeypatch, "pair")
    assert got.exact is got.ngram is None
    assert settings_of(monkeypatch, "pair", "--exact").exact is True
    got = settings_of(monkeypatch, "pair", **variables)
    assert got.exact is got.ngram is False


def test_model_and_drafter_folders(tmp_path: Path) -> None:
    hub = {"HF_MODEL_ID": "hub/id"}
    assert serve_arguments({}, tmp_path) == BASE
    assert serve_arguments(hub, tmp_path) == [*BASE, "--model", "hub/id"]
    (tmp_path / "opt/ml/model").mkdir(parents=True)
    assert serve_arguments(hub, tmp_path) == [
        *BASE,
        "--model",
        "hub/id",
    ]  # an empty folder is ignored
    (tmp_path / "opt/ml/model").rmdir()
    model = folder(tmp_path / "opt/ml/model")
    eagle = folder(tmp_path / "opt/ml/additional-model-data-sources/eagle")
    assert serve_arguments(hub, tmp_path) == [*BASE, "--model", str(model), "--drafter", str(eagle)]
    named = {"SM_VLLM_MODEL": "x", "SM_VLLM_SPECULATIVE_CONFIG": '{"model": "y"}'}
    assert "--drafter" not in serve_arguments(named, tmp_path) and serve_arguments(named, tmp_path)[
        4:6
    ] == [
        "--model",
        "x",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SM_VLLM_MAX_MODLE_LEN", "SM_VLLM_MAX_MODEL_LEN"),
        ("SM_VLLM_SPECULATIVE_CONFIGS", "SM_VLLM_SPECULATIVE_CONFIG"),
    ],
)
def test_unknown_variables_are_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"Did you mean '{words}'"):
        serve_arguments({name: "1"}, tmp_path)


def test_values_too_long_for_sagemaker_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1024"):
        serve_arguments({"SM_VLLM_MODEL": "x", "SM_VLLM_API_KEY": "k" * 1025}, tmp_path)


def test_speculative_config() -> None:
    eagle = "/opt/ml/additional-model-data-sources/eagle"
    assert parse_speculative_config(JUMPSTART) == SpeculativeConfig(eagle, "p-eagle", 3, True)
    assert parse_speculative_config('{"method": "eagle3", "model": "d"}') == SpeculativeConfig(
        "d", "eagle3", None, None
    )
    assert (
        parse_speculative_config(
            '{"model": "d", "draft_tensor_parallel_size": 1, "max_model_len": 9}'
        ).drafter
        == "d"
    )


@pytest.mark.parametrize(
    ("spec", "k", "tree"),
    [
        ('{"num_branches": [8, 8, 4, 4, 2, 2, 1], "depth": 7}', 7, 29),
        ('{"num_branches": [4, 2, 2]}', 3, 8),
        ('{"num_branches": 4, "depth": 5}', 5, 20),
        ('{"num_branches": 1, "depth": 5}', 5, 0),
    ],
)
def test_a_tree_given_by_branches_and_depth(spec: str, k: int, tree: int) -> None:
    for more in (
        "",
        f', "num_speculative_tokens": {k}',
        ', "method": "eagle3"',
        ', "parallel_drafting": true',
    ):
        text = f'{{"model": "d", "parallel_drafting_spec": {spec}{more}}}'
        assert parse_speculative_config(text) == SpeculativeConfig("d", "p-eagle", k, True, tree)


def test_trees_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = '{"model": "d", "parallel_drafting_spec": {"num_branches": 4, "depth": 5}}'
    got = settings_of(monkeypatch, "--speculative-config", spec)
    assert (got.method, got.k, got.tree, got.parallel_drafting) == ("p-eagle", 5, 20, True)
    assert settings_of(monkeypatch, "--speculative-config", spec, "--tree", "0").tree == 0
    assert (
        settings_of(monkeypatch).tree is None
        and settings_of(monkeypatch, "--tree", "48").tree == 48
    )
    got = settings_of(monkeypatch, SM_VLLM_SPECULATIVE_CONFIG=spec, SM_VLLM_TREE="16")
    assert (got.k, got.tree) == (5, 16)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"num_speculativ_tokens": 3}', "Did you mean 'num_speculative_tokens'"),
        ('{"num_speculative_tokens": 0}', "1 or more"),
        ('{"num_speculative_tokens": true}', "1 or more"),
        ('{"method": "ngram"}', "is not supported"),
        ('{"method": "eagel3"}', "Did you mean 'eagle3'"),
        ('{"parallel_drafting": "yes"}', "true or false"),
        ('{"draft_tensor_parallel_size": 2}', "one device"),
        ('{"speculative_token_tree": "[(0,)]"}', "parallel_drafting_spec, or `tree`"),
        ('{"parallel_drafting_spec": {"trees": 2}}', "must be like"),
        ('{"parallel_drafting_spec": 4}', "must be like"),
        ('{"parallel_drafting_spec": {"num_branches": 4}}', "depth is None"),
        ('{"parallel_drafting_spec": {"num_branches": 4, "depth": 0}}', "depth is 0"),
        (
            '{"parallel_drafting_spec": {"num_branches": [4, 4], "depth": 3}}',
            "for each of 3 depths",
        ),
        ('{"parallel_drafting_spec": {"num_branches": [4, 0]}}', "for each of 2 depths"),
        ('{"parallel_drafting_spec": {"num_branches": true, "depth": 3}}', "number of 1 or more"),
        (
            '{"num_speculative_tokens": 5,'
            ' "parallel_drafting_spec": {"num_branches": 4, "depth": 3}}',
            "the same as",
        ),
        (
            '{"parallel_drafting": false,'
            ' "parallel_drafting_spec": {"num_branches": 4, "depth": 3}}',
            "leave out its false",
        ),
        ('{"model": 7}', "folder"),
    ],
)
def test_speculative_config_mistakes(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_speculative_config(text)


def settings_of(
    monkeypatch: pytest.MonkeyPatch, *args: str, code: int = 0, **environment: str
) -> Any:
    """Return the settings of `peagle serve`; for another exit code, what it prints to stderr."""
    runs: list[ServerSettings] = []
    monkeypatch.setattr(run, "serve", runs.append)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["serve", *args])
    assert result.exit_code == code, result.output + result.stderr
    return runs[0] if code == 0 else result.stderr


def test_the_command_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    got = settings_of(
        monkeypatch,
        "--max-queue",
        "7",
        SM_VLLM_MODEL="m",
        SM_VLLM_MAX_NUM_SEQS="5",
        SM_VLLM_MAX_MODEL_LEN="512",
        SM_VLLM_SPECULATIVE_CONFIG=JUMPSTART,
        SM_VLLM_SERVED_MODEL_NAME='["a","b"]',
    )
    assert (got.pair, got.host, got.port, got.max_batch, got.context, got.max_queue) == (
        "m",
        "0.0.0.0",
        8080,
        5,
        512,
        7,
    )
    assert (got.method, got.k, got.parallel_drafting, got.served_model_names) == (
        "p-eagle",
        3,
        True,
        ("a", "b"),
    )
    assert got.drafter == json.loads(JUMPSTART)["model"]
    assert settings_of(monkeypatch, "other", "--port", "9").pair == "other"


@pytest.mark.parametrize("environment", [{}, {"SM_VLLM_MAX_NUM_SEQS": "3"}])
def test_the_script_serve(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without SM_VLLM_* variables: SageMaker's address; typed options take precedence."""
    runs: list[ServerSettings] = []
    monkeypatch.setattr(run, "serve", runs.append)
    monkeypatch.setattr(sys, "argv", ["serve", "--max-queue", "9"])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert (runs[0].host, runs[0].port, runs[0].max_queue) == ("0.0.0.0", 8080, 9)
    assert runs[0].max_batch == (3 if environment else 64)


def test_the_command_without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    got = settings_of(monkeypatch)
    assert (got.pair, got.host, got.port, got.k, got.method) == (
        "smollm2-135m",
        "127.0.0.1",
        8000,
        "auto",
        None,
    )
    got = settings_of(
        monkeypatch,
        "--k",
        "5",
        "--methods",
        "none,p-eagle",
        "--max-body-mb",
        "1",
        PEAGLE_API_KEY="s",
    )
    assert (got.k, got.methods, got.max_body_bytes, got.api_keys) == (
        5,
        ("none", "p-eagle"),
        1 << 20,
        ("s",),
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--engine", "natve"], "Did you mean 'native'"),
        (["--k", "many"], "auto or a number"),
        (["--k", "0"], "at least one token"),
        (["--tree", "63"], "at most 62 nodes"),
        (["--tree", "7", "-k", "7"], "is a chain"),
        (["--tree", "16", "--method", "eagle3"], "need a p-eagle drafter"),
        (["--tree", "16", "--engine", "vllm"], "parallel_drafting"),
        (
            ["--speculative-config", '{"parallel_drafting_spec": {"num_branches": 9, "depth": 7}}'],
            "at most 62 nodes",
        ),
        (
            [
                "--engine",
                "vllm",
                "--speculative-config",
                '{"parallel_drafting_spec": {"num_branches": 2, "depth": 7}}',
            ],
            "use parallel_drafting",
        ),
        (["--methods", "none,medusa"], "unknown method"),
        (["--trust-remote-code"], "never runs code"),
        (["--tensor-parallel-size", "2"], "--engine vllm, or --replicas"),
        (["--data-parallel-size", "2"], "--replicas"),
        (["--replicas", "0"], "--replicas must be in 1..256"),
        (["--http-workers", "0"], "--http-workers must be in 1..256"),
        (["--http-workers", "10000"], "--http-workers must be in 1..256"),
        (["--replicas", "10000"], "--replicas must be in 1..256"),
        (["--engine", "vllm", "--http-workers", "2"], "--engine native"),
        (["--", "--seed", "1"], "--engine vllm"),
        (["--engine", "vllm", "--int8"], "--quantization"),
        (["--engine", "vllm", "--", "--api-key=x"], "--api-key=x must not be passed on to vLLM"),
        (["--engine", "vllm", "--", "--api_key", "x"], "--api_key must not be passed on to vLLM"),
        (["--engine", "vllm", "--", "--api-k", "x"], "--api-k must not be passed on to vLLM"),
        (
            ["--engine", "vllm", "--", "--ssl_certfile=x"],
            "--ssl_certfile=x must not be passed on to vLLM",
        ),
        (["--allow-origin", "example.org"], "--allow-origin must be like https://example.org"),
        (["--engine", "vllm", "--exact"], "float32"),
        (["--engine", "vllm", "--kv-tokens", "4096"], "--gpu-memory-utilization"),
        (["--engine", "vllm", "--methods", "none"], "one method"),
        (["--engine", "vllm", "--replicas", "2"], "--data-parallel-size"),
        (["--engine", "vllm", "--device", "cuda:1"], "CUDA_VISIBLE_DEVICES"),
        (["--speculative-config", '{"modle": "d"}'], "Did you mean 'model'"),
        (["--drafter", "a", "--speculative-config", '{"model": "d"}'], "twice"),
        (["--port", "99999"], "--port"),
    ],
)
def test_mistakes_of_the_command(
    args: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words in settings_of(monkeypatch, *args, code=2)


def test_settings_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    spoken = '{"model": "d", "draft_tensor_parallel_size": 2, "num_speculative_tokens": 4}'
    options = [
        "--engine",
        "vllm",
        "--tensor-parallel-size",
        "2",
        "--trust-remote-code",
        "--speculative-config",
        spoken,
    ]
    got = settings_of(
        monkeypatch, "pair", *options, "--vllm-python", "py", "--", "--seed", "1", "--no-x"
    )
    assert got.exact is None
    assert (got.pair, got.engine, got.tensor_parallel, got.trust_remote_code) == (
        "pair",
        "vllm",
        2,
        True,
    )
    assert (got.vllm_python, got.vllm_arguments) == ("py", ("--seed", "1", "--no-x"))
    assert (got.drafter, got.k, got.vllm_speculative) == ("d", 4, {"draft_tensor_parallel_size": 2})
    # not used by the native engine
    assert settings_of(monkeypatch, PEAGLE_VLLM_PYTHON="py").vllm_python is None


def test_sagemaker_variables_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "SM_VLLM_ENGINE": "vllm",
        "SM_VLLM_MODEL": "smollm2-135m",
        "SM_VLLM_GPU_MEMORY_UTILIZATION": "0.9",
        "SM_VLLM_ASYNC_SCHEDULING": "true",
        "SM_VLLM_ENABLE_EXPERT_PARALLEL": "false",
        "SM_VLLM_LORA_MODULES": '["a=x", "b=y"]',
        "SM_VLLM_MAX_NUM_SEQS": "3",
    }
    got = settings_of(monkeypatch, "--", "--seed", "1", **environment)
    assert (got.engine, got.host, got.max_batch) == ("vllm", "0.0.0.0", 3)
    assert got.vllm_arguments == (
        "--async-scheduling",
        "--gpu-memory-utilization",
        "0.9",
        "--lora-modules",
        "a=x",
        "b=y",
        "--seed",
        "1",
    )


def test_tool_call_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native engine supports the names of vLLM; with vLLM, the options are passed through."""
    environment = {
        "SM_VLLM_MODEL": "smollm2-135m",
        "SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true",
        "SM_VLLM_TOOL_CALL_PARSER": "qwen3_coder",
        "SM_VLLM_REASONING_PARSER": "qwen3",
    }
    got = settings_of(monkeypatch, **environment)
    assert (got.tool_parser, got.reasoning_parser) == ("qwen3_coder", "qwen3")
    got = settings_of(monkeypatch, SM_VLLM_ENGINE="vllm")
    assert (got.tool_parser, got.reasoning_parser) == (None, None)
    assert got.vllm_arguments == (
        "--enable-auto-tool-choice",
        "--reasoning-parser",
        "qwen3",
        "--tool-call-parser",
        "qwen3_coder",
    )


def test_every_option_has_a_variable() -> None:
    command: Any = get_command(app)
    options = {
        option.removeprefix("--")
        for parameter in command.get_command(None, "serve").params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--")
    }
    left_out = {"help", "vllm-argument", "model"}
    assert options - left_out <= {*VALUE_OPTIONS, *FLAG_OPTIONS}


def test_every_option_reaches_a_setting() -> None:
    command: Any = get_command(app)
    parameters = {parameter.name for parameter in command.get_command(None, "serve").params}
    settings = {field.name for field in fields(ServerSettings)}
    assert parameters - settings == {"model", "speculative_config", "enforce_eager"}


def test_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import peagle.server as server

    monkeypatch.setattr(server, "REQUIRED_PACKAGES", ("no_such_package",))
    assert "pip install 'peagle[serve]'" in settings_of(monkeypatch, code=2)


def test_origins_are_accepted(tmp_path: Path) -> None:
    one = {"SM_VLLM_ALLOW_ORIGIN": "https://a.example"}
    assert serve_arguments(one, tmp_path)[-2:] == ["--allow-origin", "https://a.example"]
    two = {"SM_VLLM_ALLOW_ORIGIN": '["https://a.example", "https://b.example"]'}
    words = ["--allow-origin", "https://a.example", "--allow-origin", "https://b.example"]
    assert serve_arguments(two, tmp_path)[-4:] == words
