"""README's tables of results: filled by a script, and never stale."""

import subprocess
import sys
from pathlib import Path

from tests.support.results import result, write

ROOT = Path(__file__).parents[2]


def test_readme_blocks(tmp_path: Path) -> None:
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


def test_readme_is_not_stale() -> None:
    assert "<!-- bench:start" in (ROOT / "README.md").read_text()
    call = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "readme_table.py"), "--check"], cwd=ROOT
    )
    assert call.returncode == 0
