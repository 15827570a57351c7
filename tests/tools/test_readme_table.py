"""The result tables of README.md and docs/results.md are generated and up to date."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bench.results import result, write

ROOT = Path(__file__).parents[2]


def test_blocks_of_a_readme_are_filled(tmp_path: Path) -> None:
    write(tmp_path / "results" / "cpu", result(sets=("humaneval", "gsm8k")))
    readme = tmp_path / "README.md"
    blocks = [
        f"<!-- bench:start {name} -->\nold\n<!-- bench:end -->\n" for name in ("cpu", "cpu:gsm8k")
    ]
    readme.write_text("a\n" + "b\n".join(blocks))
    command = [sys.executable, str(ROOT / "tools" / "readme_table.py"), "--readme", str(readme)]
    command += ["--results", str(tmp_path / "results")]

    def call(*more: str) -> int:
        return subprocess.run([*command, *more], capture_output=True, cwd=ROOT, env=None).returncode

    assert call("--check") == 1 and "old" in readme.read_text()
    assert call() == 0 and call("--check") == 0
    text = readme.read_text()
    assert (
        text.startswith("a\n<!-- bench:start cpu -->\n**smollm2")
        and "old" not in text
        and text.count("| `none`") == 2
    )
    readme.write_text("<!-- bench:start nowhere -->\n<!-- bench:end -->\n")
    assert call() == 2
    readme.write_text("<!-- bench:start cpu -->\n")
    assert call() == 2


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_both_pages_are_filled_by_default(page: str, tmp_path: Path) -> None:
    for name in ("README.md", "docs/results.md", "tools/readme_table.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs" / "results").symlink_to(ROOT / "docs" / "results")
    intact = (tmp_path / page).read_text()
    header, rest = intact.split("<!-- bench:end -->", 1)
    (tmp_path / page).write_text(f"{header}stale\n<!-- bench:end -->{rest}")

    def call(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "tools" / "readme_table.py"), *more]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    check = call("--check")
    assert check.returncode == 1 and f"{Path(page).name} is stale" in check.stderr
    assert call().returncode == 0 and call("--check").returncode == 0
    assert (tmp_path / page).read_text() == intact


def test_the_tables_are_up_to_date() -> None:
    for page in ("README.md", "docs/results.md"):
        assert "<!-- bench:start" in (ROOT / page).read_text()
    call = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "readme_table.py"), "--check"], cwd=ROOT
    )
    assert call.returncode == 0
