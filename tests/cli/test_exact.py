"""The option --exact/--no-exact: from `serve`, `bench` and `tune` to the engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from peagle.bench.load.engine_pool import EnginePool
from peagle.server import run as server_run
from peagle.server.engines.engine_factory import EngineFactory
from peagle.server.settings import ServerSettings
from tests.support.bench.benching import tiny_folder, write_set
from tests.support.command_line import run
from tests.support.kernels.cpu_features import needs_c

MODES = [([], "batched"), (["--exact"], "batched"), (["--no-exact"], None)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_folder(tmp_path_factory.mktemp("exact"))
    write_set(root / "talk.jsonl", 3)
    return root


@needs_c
@pytest.mark.parametrize(("options", "mode"), MODES)
def test_serve_passes_the_mode_to_the_engine(
    options: list[str], mode: str | None, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[ServerSettings] = []
    monkeypatch.setattr(server_run, "serve", settings.append)
    given = ("--dtype", "bfloat16", "--device", "cpu", "--kv-tokens", 512, "--method", "none")
    run("serve", tiny / "target", *given, *options)
    factory = EngineFactory(settings[0])
    factory.load()
    engine = factory.build_main()
    assert engine.max_batch == 64 and engine.status()["exact_mode"] == mode
    engine.close()


@needs_c
@pytest.mark.parametrize(("options", "mode"), MODES)
def test_bench_records_the_mode_of_each_cell(
    options: list[str], mode: str | None, tiny: Path, tmp_path: Path
) -> None:
    """A result file contains the exact mode of each cell."""
    bench(tiny, tmp_path, "bfloat16", *options)
    content = json.loads((tmp_path / "r.json").read_text())
    assert [cell["exact_mode"] for cell in content["cells"]] == [mode or "off"] * 2
    assert all(
        cell["check"] is None or cell["check"]["identical"] == 3 for cell in content["cells"]
    )
    given = {"--exact": True, "--no-exact": False}
    assert content["settings"]["exact"] is (given[options[0]] if options else None)


def test_bench_in_float32_is_not_exact_by_default(tiny: Path, tmp_path: Path) -> None:
    bench(tiny, tmp_path, "float32")
    content = json.loads((tmp_path / "r.json").read_text())
    assert [cell["exact_mode"] for cell in content["cells"]] == ["off"] * 2


def bench(tiny: Path, out: Path, dtype: str, *options: str) -> None:
    given = ("--set", tiny / "talk.jsonl", "--drafter", tiny / "p-eagle", "--device", "cpu")
    cells = ("--methods", "none,p-eagle", "-k", 3, "--concurrency", 2)
    size = ("--max-tokens", 6, "--repeats", 1, "--warmup", 2, "--name", "r", "--out", out)
    run("bench", tiny / "target", "--dtype", dtype, *given, *cells, *size, *options)


@pytest.mark.parametrize("option", ["--exact", "--no-exact"])
def test_the_option_is_refused_for_endpoints(option: str, tiny: Path) -> None:
    given = ("--endpoint", "http://127.0.0.1:9", "--set", tiny / "talk.jsonl")
    assert "--exact is for peagle's own engine" in run("bench", *given, option, code=2)


def test_tune_uses_the_default_of_serve(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    pools: list[Any] = []
    build = EnginePool._build

    def building(pool: EnginePool, *args: Any) -> Any:
        pools.append(pool.exact)
        return build(pool, *args)

    monkeypatch.setattr(EnginePool, "_build", building)
    given = ("--set", tiny / "talk.jsonl", "--dtype", "float32", "--max-tokens", 4, "-k", 1)
    run("tune", tiny / "target", *given, "--concurrency", 2)
    assert set(pools) == {ServerSettings().exact}
