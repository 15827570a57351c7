"""README's tables of results come from docs/results/, not from a hand.

    python tools/readme_table.py            # writes them
    python tools/readme_table.py --check    # exit code 1 if README is stale

Between `<!-- bench:start NAME -->` and `<!-- bench:end -->` goes the Markdown of docs/results/NAME: the mean over sets,
or with NAME:SET one set.
"""

import argparse
import re
import sys
from pathlib import Path

from peagle.errors import UserError
from peagle.report.machines import machines
from peagle.report.markdown import markdown
from peagle.results.runs import read_runs

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- bench:start (\S+) -->\n)(.*?)(<!-- bench:end -->)", re.DOTALL)


def filled(text: str, results: Path) -> str:
    """The text with every block made anew."""
    counts = {
        text.count("<!-- bench:start"),
        text.count("<!-- bench:end"),
        len(BLOCK.findall(text)),
    }
    if len(counts) > 1:
        raise UserError(
            "a bench:start without its bench:end (or the other way round): markers stand in pairs"
        )
    return BLOCK.sub(lambda found: f"{found[1]}{table(found[2], results)}\n{found[4]}", text)


def table(name: str, results: Path) -> str:
    folder, _, only = name.partition(":")
    runs = read_runs(results / folder, lambda line: print(line, file=sys.stderr))
    if only and only not in {cell.set for run in runs for cell in run.cells}:
        raise UserError(f"docs/results/{folder} has no set {only!r}: correct the marker")
    return markdown(machines(runs), only or None)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if README is stale"
    )
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args()
    before = options.readme.read_text(encoding="utf-8")
    try:
        after = filled(before, options.results)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.check and after != before:
        print(f"{options.readme.name} is stale: run python tools/readme_table.py", file=sys.stderr)
        return 1
    if not options.check and after != before:
        options.readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
