"""Fill the tables and the figure of docs/science.md from the records in docs/results/comparison/.

    python -m tools.comparison            # writes them (make comparison)
    python -m tools.comparison --check    # exit code 1 if a table is stale

The text between `<!-- comparison:start NAME -->` and `<!-- comparison:end -->` is one of TABLES.
tools/ladder.py and tools/ladder_speed.py write the records. Those of a second target are in a
sub-folder, and in the table `second`.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from peagle.errors import UserError
from peagle.report.words import DASH, amount
from tools.comparison_figure import draw

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "comparison"
BLOCK = re.compile(r"(<!-- comparison:start (\S+) -->\n)(.*?)(<!-- comparison:end -->)", re.DOTALL)
NOTHING = "Nothing was recorded yet."
BASE = "p-eagle"  # the run that the others are compared with
KS = (3, 5, 7, 11)
TIMES = ("seconds", "seconds_compiled")

Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Rung:
    """One run of the ladder: the records of all its seeds."""

    name: str
    label: str
    target: str
    records: tuple[dict[str, Any], ...]
    second: bool = False  # Its records are in a sub-folder.

    @property
    def first(self) -> dict[str, Any]:
        return self.records[0]

    @property
    def trained(self) -> bool:
        return "sets" in self.first

    @property
    def sets(self) -> list[str]:
        return list(self.first.get("sets", ()))

    def lengths(self, k: int, only: str | None = None, tree: str = "") -> list[float]:
        """The acceptance length of each seed: of one set, or the mean over sets.

        With `tree`, only of the seeds that have this tree.
        """
        names = [only] if only else self.sets
        shape = f"{tree}K={k}"
        seeds = [[record["sets"][name].get(shape) for name in names] for record in self.records]
        return [mean(cell["acceptance_length"] for cell in cells) for cells in seeds if all(cells)]

    @property
    def branched(self) -> "Rung":
        """The run with only the seeds that have trees."""
        records = tuple(
            record
            for record in self.records
            if any("tree" in shape for shape in record["sets"][self.sets[0]])
        )
        return replace(self, records=records)

    def positions(self, k: int) -> list[float]:
        """The share of passes that accepted draft i, mean over sets and seeds."""
        cells = [
            record["sets"][name][f"K={k}"]["accepted_per_position"]
            for record in self.records
            for name in self.sets
        ]
        return [mean(shares) for shares in zip(*cells, strict=True)]

    @property
    def engine(self) -> list[dict[str, Any]]:
        """The measurements on the engine, of the first seed that has them."""
        return next((record["engine"] for record in self.records if record.get("engine")), [])


def read_rungs(folder: Path) -> list[Rung]:
    """The runs of the folder, then those of its sub-folders."""
    return read_folder(folder) + [
        rung for path in sorted(folder.glob("*/")) for rung in read_folder(path, second=True)
    ]


def read_folder(folder: Path, second: bool = False) -> list[Rung]:
    """The runs by target, in the order of the ladder."""
    file = folder / "ladder.toml"
    order = (
        [run["name"] for run in tomllib.loads(file.read_text())["run"]] if file.is_file() else []
    )
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not {"name", "label", "target", "method"} <= record.keys():
            raise UserError(f"{path} is not a record of tools/ladder.py: move it elsewhere")
        groups.setdefault((record["target"], record["name"]), []).append(record)
    rungs = [
        Rung(
            name,
            records[0]["label"],
            target,
            tuple(sorted(records, key=lambda record: record["seed"])),
            second,
        )
        for (target, name), records in groups.items()
    ]
    index = {name: i for i, name in enumerate(order)}
    return sorted(
        rungs, key=lambda rung: (rung.target, index.get(rung.name, len(index)), rung.name)
    )


def spread(values: list[float], digits: int = 2) -> str:
    """The mean; with several seeds also the minimum and the maximum."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def against(value: float, base: float | None) -> str:
    return DASH if not base else f"{value / base - 1:+.1%}"


def lengths(rungs: list[Rung]) -> list[Row]:
    base = next(
        (mean(rung.lengths(7)) for rung in rungs if rung.name == BASE and rung.trained), None
    )
    rungs = [rung for rung in rungs if rung.trained]
    sets = rungs[0].sets if rungs else []
    rows: list[Row] = [
        [
            "drafter",
            *(f"K={k}" for k in KS),
            "K=7 against P-EAGLE",
            *(f"{name}, K=7" for name in sets),
        ]
    ]
    for rung in rungs:
        means = [spread(rung.lengths(k)) for k in KS]
        own = [spread(rung.lengths(7, name)) for name in sets]
        rows.append([rung.label, *means, against(mean(rung.lengths(7)), base), *own])
    return rows


def trees(rungs: list[Rung]) -> list[Row]:
    """One column per tree, of the seeds that have it, and the gain over the chain of its depth."""
    shapes = [("tree 15, ", 7), ("tree 31, ", 7), ("tree 31, ", 11)]
    rows: list[Row] = [
        ["drafter", "K=7", *(f"{tree}K={k}" for tree, k in shapes), "tree 31 against K=7"]
    ]
    for rung in (
        rung.branched for rung in rungs if rung.trained and rung.lengths(7, tree="tree 31, ")
    ):
        own = [rung.lengths(k, tree=tree) for tree, k in shapes]
        more = against(mean(own[1]), mean(rung.lengths(7)))
        rows.append([rung.label, spread(rung.lengths(7)), *map(spread, own), more])
    return rows


def positions(rungs: list[Rung]) -> list[Row]:
    rows: list[Row] = [["drafter", *map(str, range(1, 12))]]
    return rows + [
        [rung.label, *(f"{share:.2f}" for share in rung.positions(11))]
        for rung in rungs
        if rung.trained
    ]


def runs(rungs: list[Rung]) -> list[Row]:
    rows: list[Row] = [
        [
            "drafter",
            "seeds",
            "settings",
            "steps",
            "target tokens",
            "minutes",
            "compiled",
            "on",
            "MB",
        ]
    ]
    for rung in rungs:
        if rung.trained:
            record = rung.first
            words = [f"`{key}={as_text(value)}`" for key, value in record["settings"].items()]
            settings = ", ".join(words) or DASH
            minutes = [spread([seed[key] / 60 for seed in rung.records], 1) for key in TIMES]
            numbers = [
                f"{record['steps']:,}",
                f"{record['target_tokens'] / 1e6:.1f} M",
                *minutes,
                record["device"],
            ]
            rows.append(
                [
                    rung.label,
                    str(len(rung.records)),
                    settings,
                    *numbers,
                    f"{record['bytes'] / 1e6:.1f}",
                ]
            )
    return rows


def as_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def speeds(rungs: list[Rung]) -> list[Row]:
    concurrency = sorted(
        {int(c) for rung in rungs for entry in rung.engine for c in entry["tokens_per_second"]}
    )
    rows: list[Row] = [
        [
            "drafter",
            "set",
            "drafts",
            *(f"c={c}" for c in concurrency),
            "acceptance length",
            "step, ms",
            "against P-EAGLE's",
        ]
    ]
    base = {
        (entry["set"], entry["shape"]): entry["step_ms"]
        for rung in rungs
        if rung.name == BASE
        for entry in rung.engine
    }
    for rung in sorted(rungs, key=lambda rung: rung.first["method"] != "none"):
        for entry in rung.engine:
            shape = DASH if rung.first["method"] == "none" else entry["shape"]
            cells = [amount(entry["tokens_per_second"].get(str(c)), 0) for c in concurrency]
            length = f"{entry['acceptance_length']:.2f}"
            step = f"{entry['step_ms']:.2f}"
            more = against(entry["step_ms"], base.get((entry["set"], entry["shape"])))
            rows.append([rung.label, entry["set"], shape, *cells, length, step, more])
    return rows


# The columns of the table `second`.
SECOND = re.compile(r"(tree \d+, )?K=\d+|K=7 against P-EAGLE|target tokens|minutes|MB|c=\d+")


def second(rungs: list[Rung]) -> list[Row]:
    """One row per drafter, with columns of the other tables; speeds of the first set and shape."""
    rows = {name: [name] for name in ("drafter", *(rung.label for rung in rungs))}
    for make in (lengths, trees, runs, speeds):
        first_rows: dict[str, Row] = {}
        for row in make(rungs):
            first_rows.setdefault(row[0], row)
        header = first_rows["drafter"]
        columns = [
            i
            for i, name in enumerate(header)
            if SECOND.fullmatch(name) and name not in rows["drafter"]
        ]
        for name, cells in rows.items():
            cells += [first_rows[name][i] if name in first_rows else DASH for i in columns]
    return list(rows.values())


TABLES: dict[str, Callable[[list[Rung]], list[Row]]] = {
    "lengths": lengths,
    "positions": positions,
    "runs": runs,
    "second": second,
    "speeds": speeds,
    "trees": trees,
}


def table(name: str, rungs: list[Rung]) -> str:
    """One table per target, under its name if there are several."""
    if name not in TABLES:
        raise UserError(f"there is no table {name!r}: the marker is one of {', '.join(TABLES)}")
    parts = []
    rungs = [rung for rung in rungs if rung.second == (name == "second")]
    targets = list(dict.fromkeys(rung.target for rung in rungs))
    for target in targets:
        header, *rows = TABLES[name]([rung for rung in rungs if rung.target == target])
        if rows:
            lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
            parts.append("\n".join(([f"{target}:", ""] if len(targets) > 1 else []) + lines))
    return "\n\n".join(parts) or NOTHING


def fill_blocks(text: str, rungs: list[Rung]) -> str:
    counts = {
        text.count("<!-- comparison:start"),
        text.count("<!-- comparison:end"),
        len(BLOCK.findall(text)),
    }
    if len(counts) > 1:
        raise UserError(
            "a comparison:start has no comparison:end, or the reverse: markers come in pairs"
        )
    return BLOCK.sub(lambda match: f"{match[1]}{table(match[2], rungs)}\n{match[4]}", text)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a table is stale"
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "science.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    try:
        rungs = read_rungs(options.results)
        before = options.page.read_text(encoding="utf-8")
        after = fill_blocks(before, rungs)
        if options.check:
            if after != before:
                print(f"{options.page.name} is stale: run make comparison", file=sys.stderr)
            return int(after != before)
        options.page.write_text(after, encoding="utf-8")
        first = [rung for rung in rungs if not rung.second]
        if any(rung.trained for rung in first):
            draw(first, options.page.with_name("comparison"))
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
