"""Fill the result tables of README.md and docs/results.md from the records in docs/results/.

    python tools/readme_table.py            # writes the tables
    python tools/readme_table.py --check    # exit code 1 if a table is stale

The text between `<!-- bench:start NAME -->` and `<!-- bench:end -->` is the table of
docs/results/NAME: the mean over sets, or with NAME:SET one set.
"""

import argparse
import re
import sys
from pathlib import Path

from peagle.errors import UserError
from peagle.report.machines import group_by_machine
from peagle.report.markdown import markdown
from peagle.results.run_folder import read_results

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
BLOCK = re.compile(r"(<!-- bench:start (\S+) -->\n)(.*?)(<!-- bench:end -->)", re.DOTALL)


def fill_blocks(text: str, results: Path) -> str:
    """Return the text with every block generated again."""
    counts = {
        text.count("<!-- bench:start"),
        text.count("<!-- bench:end"),
        len(BLOCK.findall(text)),
    }
    if len(counts) > 1:
        raise UserError("a bench:start has no bench:end, or the reverse: markers come in pairs")
    return BLOCK.sub(lambda match: f"{match[1]}{table(match[2], results)}\n{match[4]}", text)


def table(name: str, folder: Path) -> str:
    run_name, _, only_set = name.partition(":")
    results = read_results(folder / run_name, lambda line: print(line, file=sys.stderr))
    if only_set and only_set not in {cell.set for result in results for cell in result.cells}:
        raise UserError(f"docs/results/{run_name} has no set {only_set!r}: correct the marker")
    return markdown(group_by_machine(results), only_set or None)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a table is stale"
    )
    parser.add_argument(
        "--readme", type=Path, help="fill this file only, not README.md and docs/results.md"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    stale: dict[Path, str] = {}  # page -> its new text
    try:
        for page in [options.readme] if options.readme else PAGES:
            before = page.read_text(encoding="utf-8")
            after = fill_blocks(before, options.results)
            if after != before:
                stale[page] = after
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for page, text in stale.items():
        if options.check:
            print(f"{page.name} is stale: run python tools/readme_table.py", file=sys.stderr)
        else:
            page.write_text(text, encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
