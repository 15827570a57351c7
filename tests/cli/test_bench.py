"""The commands `peagle bench` and `peagle tune`: results, endpoints, Ctrl-C, wrong options."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.bench.load.native import NativeRunner
from peagle.bench.quality.sandbox import find_sandbox
from tests.support.bench.benching import serving, tiny_folder, write_set
from tests.support.command_line import run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_folder(tmp_path_factory.mktemp("bench"))
    write_set(root / "talk.jsonl", 4, turns=2)
    write_set(root / "gsm8k.jsonl", 3)
    return root


def bench(tiny: Path, *args: object, code: int = 0) -> str:
    given = (
        "--set",
        tiny / "talk.jsonl",
        "--drafter",
        f"{tiny / 'p-eagle'},{tiny / 'eagle3'}",
        "--dtype",
        "float32",
    )
    small = ("--max-tokens", 6, "--repeats", 2, "--warmup", 2, "--name", "r")
    return run("bench", tiny / "target", *given, *small, *args, code=code)


def read_file(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "r.json").read_text())


def all_identical(baseline: int) -> dict[str, Any]:
    """The check of a cell whose answers all equal those of `none` at this concurrency."""
    return {"compared": 8, "identical": 8, "differences": [], "baseline_concurrency": baseline}


def test_sampled_answers_are_checked_too(tiny: Path, tmp_path: Path) -> None:
    args = ("-k", 3, "--methods", "none,p-eagle", "--concurrency", "1,3", "--temperature", 1)
    bench(tiny, *args, "--out", tmp_path)
    checks = [cell["check"] for cell in read_file(tmp_path)["cells"]]
    assert checks == [None, *[all_identical(1)] * 3]


def test_trees_beside_chains(tiny: Path, tmp_path: Path) -> None:
    output = bench(tiny, "-k", "3", "--tree", "0,12", "--concurrency", "2", "--out", tmp_path)
    content = read_file(tmp_path)
    assert content["settings"]["tree"] == [0, 12]
    assert [(c["method"], c["k"], c["tree"]) for c in content["cells"]] == [
        ("none", 0, 0),
        ("eagle3", 3, 0),
        ("p-eagle", 3, 0),
        ("p-eagle", 3, 12),
    ]
    chain, tree = content["cells"][2:]
    assert (set(chain["k_steps"]), set(tree["k_steps"])) == ({"3"}, {"12"})
    assert tree["check"] == all_identical(2)
    assert len(tree["spec_decode_per_position_acceptance_rates"]) == 3
    assert output.count("p-eagle tree 12") == 1


def test_a_complete_run(tiny: Path, tmp_path: Path) -> None:
    output = bench(tiny, "-k", "2,11", "--concurrency", "1,3", "--out", tmp_path)
    content = read_file(tmp_path)
    assert content["format"] == "peagle-bench/1"
    assert content["command"].startswith("peagle")
    assert (content["engine"], content["pair"], content["target"]["name"]) == (
        "native",
        "target",
        "target",
    )
    assert set(content["drafters"]) == {"p-eagle", "eagle3"}
    assert content["environment"]["torch"]
    cells = content["cells"]
    assert [(c["concurrency"], c["method"], c["k"]) for c in cells] == [
        (c, m, k)
        for c in (1, 3)
        for m, k in (("none", 0), ("eagle3", 2), ("eagle3", 11), ("p-eagle", 2), ("p-eagle", 11))
    ]
    for cell in cells:
        assert (cell["requests"], cell["failed"], cell["repeats"]) == (8, 0, 2)
        baseline = (cell["method"], cell["concurrency"]) == ("none", 1)
        assert cell["check"] == (None if baseline else all_identical(1))
        if cell["method"] != "none":
            assert len(cell["spec_decode_per_position_acceptance_rates"]) == cell["k"]
    assert "r.json" in output and output.count("8 of 8") == len(cells) - 1
    # The command line is the only field that contains a local path.
    assert str(tiny) not in json.dumps({**content, "command": ""})


def test_an_interrupted_run_resumes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("-k", 2, "--methods", "none,p-eagle", "--concurrency", "2", "--out", tmp_path)
    runs: list[Any] = []
    whole = NativeRunner.run

    def counted(self: NativeRunner, key: Any, jobs: Any, on_request: Any) -> Any:
        if len(runs) == 3:
            raise KeyboardInterrupt
        runs.append(key)
        return whole(self, key, jobs, on_request)

    monkeypatch.setattr(NativeRunner, "run", counted)
    stopped = bench(tiny, *args, code=130)
    # There is no progress bar without a terminal.
    assert "4/4 talk none c=2, run 2 of 2" in stopped
    assert "the same command resumes the run" in stopped
    assert sorted(cell["repeats"] for cell in read_file(tmp_path)["cells"]) == [1, 2]
    runs.clear()
    bench(tiny, *args)
    assert len(runs) == 1
    assert [cell["repeats"] for cell in read_file(tmp_path)["cells"]] == [2, 2]
    assert read_file(tmp_path)["cells"][1]["check"]["identical"] == 8
    bench(tiny, *args)
    assert len(runs) == 1  # complete
    assert "settings max_tokens 6 instead of 7" in bench(tiny, *args, "--max-tokens", 7, code=2)


def test_a_profile(tiny: Path, tmp_path: Path) -> None:
    args = (
        "--profile",
        "median=8,p90=20,prompt=40,count=5",
        "--methods",
        "none",
        "--concurrency",
        "2",
    )
    run(
        "bench",
        tiny / "target",
        *args,
        "--out",
        tmp_path,
        "--name",
        "r",
        "--repeats",
        1,
        "--dtype",
        "float32",
    )
    [cell] = read_file(tmp_path)["cells"]
    assert cell["set"] == "m8-p20"
    assert cell["requests"] == 5
    assert cell["total_output_tokens"] > 5


def test_scores(tiny: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"id": i, "turns": ["w7 w8"], "answer": "#### 3"}) for i in range(2)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    args = (
        "--set",
        tmp_path / "sums.jsonl",
        "--methods",
        "none",
        "--concurrency",
        1,
        "--max-tokens",
        4,
        "--score",
    )
    output = run(
        "bench", tiny / "target", *args, "--out", tmp_path, "--name", "r", "--dtype", "float32"
    )
    assert "sums none: accuracy" in output
    assert read_file(tmp_path)["scores"][0]["of"] == 2


def test_scores_of_programs_need_a_sandbox(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused with exit code 2 before anything is measured."""
    task = {"turns": ["w7 w8"], "prompt": "x", "test": "x", "entry_point": "f"}
    (tmp_path / "code.jsonl").write_text(json.dumps({"id": 1, **task}))
    machine = SimpleNamespace(machine=lambda: "riscv64")
    monkeypatch.setattr("peagle.bench.quality.sandbox.launch.platform", machine)
    find_sandbox.cache_clear()
    args = ("--set", tmp_path / "code.jsonl", "--methods", "none", "--concurrency", 1, "--score")
    output = run(
        "bench", tiny / "target", *args, "--out", tmp_path, "--name", "r", "--max-tokens", 4, code=2
    )
    assert "cannot be scored on linux riscv64: use Linux" in " ".join(output.split())
    assert not (tmp_path / "r.json").exists()


def test_an_endpoint(tiny: Path, tmp_path: Path) -> None:
    with serving() as server:
        args = (
            "--endpoint",
            server.url,
            "--set",
            tiny / "talk.jsonl",
            "--concurrency",
            "1,2",
            "--api-key",
            "s3cret",
        )
        run(
            "bench",
            "some-pair",
            *args,
            "--methods",
            "p-eagle",
            "-k",
            7,
            "--out",
            tmp_path,
            "--name",
            "r",
        )
        content = read_file(tmp_path)
        assert "s3cret" not in (tmp_path / "r.json").read_text()
        assert (content["engine"], content["endpoint"], content["pair"]) == (
            "endpoint",
            server.url,
            "some-pair",
        )
        assert content["target"]["name"] == "served"
        assert [(cell["method"], cell["k"], cell["concurrency"]) for cell in content["cells"]] == [
            ("p-eagle", 7, 1),
            ("p-eagle", 7, 2),
        ]
        run(
            "bench",
            *args,
            "--out",
            tmp_path,
            "--name",
            "plain",
            "--repeats",
            1,
            "--methods",
            "none",
        )
        run("bench", *args, "--out", tmp_path, "--name", "e", "--repeats", 1, "--baseline", "plain")
    compared = json.loads((tmp_path / "e.json").read_text())["cells"][0]
    assert (compared["method"], compared["k"]) == ("endpoint", 0)
    assert compared["check"] == all_identical(1)


def test_an_endpoint_that_fails(tiny: Path, tmp_path: Path) -> None:
    args = (
        "--set",
        tiny / "talk.jsonl",
        "--concurrency",
        "1,2",
        "--out",
        tmp_path,
        "--name",
        "r",
        "--repeats",
        1,
    )
    with serving(failure="500") as server:
        url = server.url
        output = run("bench", "--endpoint", url, *args, code=1)
    assert "every request failed, the first with: HTTP 500" in output
    assert [cell["failed"] for cell in read_file(tmp_path)["cells"]] == [4, 4]
    assert "start the server, or correct --endpoint" in run(
        "bench", "--endpoint", url, *args, code=2
    )
    with serving(failure="some 500") as server:
        run("bench", "--endpoint", server.url, *args[:-4], "--name", "s", "--repeats", 1)
    some = json.loads((tmp_path / "s.json").read_text())["cells"]
    assert all(0 < cell["failed"] < cell["requests"] for cell in some)


MISTAKES = {
    "unknown set": (["--set", "humanevel"], "Did you mean 'humaneval'"),
    "no such file": (["--set", "mine.jsonl"], "no file mine.jsonl"),
    "bad K": (["-k", "3,x"], "write it like -k 3,5,7,11"),
    "K below 1": (["-k", "0"], "or --methods none"),
    "bad trees": (["--tree", "0,x"], "write it like --tree 32"),
    "trees of the default K": (["--tree", "11"], "is a chain"),
    "trees of eagle3": (["--methods", "none,eagle3", "--tree", "16"], "needs a p-eagle drafter"),
    "trees of an endpoint": (
        ["--endpoint", "http://127.0.0.1:9", "--tree", "16"],
        "peagle's own engine",
    ),
    "bad concurrency": (["--concurrency", "1,0"], "write it like --concurrency 1,8,64"),
    "bad method": (["--methods", "none,peagle"], "Did you mean 'p-eagle'"),
    "bad profile": (["--profile", "reasonin"], "Did you mean 'reasoning'"),
    "no drafter": (
        ["--methods", "p-eagle", "--set", "{root}/talk.jsonl"],
        "give one with --drafter",
    ),
    "unknown category": (["--set", "{root}/talk.jsonl:x"], "has no task of category 'x'"),
    "no tokens": (
        ["--max-tokens", "0", "--set", "{root}/talk.jsonl"],
        "--max-tokens must be 1 or more",
    ),
    "clients of no endpoint": (["--clients", "2"], "--clients is for servers: give --endpoint"),
    "no clients": (["--endpoint", "http://h", "--clients", "0"], "--clients must be in 1..256"),
    "too many clients": (["--endpoint", "http://h", "--clients", "257"], "must be in 1..256"),
    "two K at an endpoint": (["--endpoint", "http://h", "-k", "3,5"], "one of each"),
    "no URL": (["--endpoint", "h:80", "--set", "{root}/talk.jsonl"], "write it like http://"),
    "a file as folder": (
        ["--set", "{root}/talk.jsonl", "--methods", "none", "--out", "{root}/talk.jsonl"],
        "is a file",
    ),
    "a bad name": (
        ["--set", "{root}/talk.jsonl", "--methods", "none", "--name", "a/b"],
        "must be a file name",
    ),
}


@pytest.mark.parametrize(("args", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_one_line_and_code_2(
    tiny: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    filled = [arg.format(root=tiny) for arg in args]
    out = [] if "--out" in args else ["--out", tmp_path]
    concurrency = [] if "--concurrency" in args else ["--concurrency", 1]
    output = run(
        "bench", tiny / "target", "--dtype", "float32", *concurrency, *out, *filled, code=2
    )
    assert message in output
    assert output.count("\n") == 1


def test_tune(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    given = (
        "--set",
        tiny / "gsm8k.jsonl",
        "--dtype",
        "float32",
        "--max-tokens",
        6,
        "--concurrency",
        "1,2",
        "-k",
        "1,2",
    )
    plan = run("tune", tiny / "target", *given, "--dry-run")
    assert "At most 2 measurements" in plan
    assert not (tmp_path / "home" / "pairs").exists()
    output = run("tune", tiny / "target", *given, "--price", 4.5)
    assert output.count("\n") == 3
    assert "at 4.5 an hour" in output
    from peagle.loaded import load

    loaded = load(str(tiny / "target"), dtype="float32")
    assert {c: best.method for c, best in loaded.pair.k_by_concurrency.items()} == {
        1: "none",
        2: "none",
    }
    assert "like --price 4.5" in run("tune", tiny / "target", *given, "--price", -1, code=2)
