"""docs/science.md's tables and figure come from the records in docs/results/comparison/, not from a hand.

    python -m tools.comparison            # writes them (make comparison)
    python -m tools.comparison --check    # exit code 1 if a table is stale

Between `<!-- comparison:start NAME -->` and `<!-- comparison:end -->` goes one of the TABLES. Records are made by
tools/ladder.py and tools/ladder_speed.py; those of a second target lie in a sub-folder and go into the table `second`.
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
BASE = "p-eagle"  # what the others are measured against
KS = (3, 5, 7, 11)

Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Rung:
    """A run of the ladder with all its seeds: their records."""

    name: str
    label: str
    target: str
    records: tuple[dict[str, Any], ...]
    second: bool = False  # of a sub-folder

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
        """Of each seed: the acceptance length of a set, or the mean over sets; of a tree, of the seeds that have it."""
        names, form = [only] if only else self.sets, f"{tree}K={k}"
        told = [[one["sets"][name].get(form) for name in names] for one in self.records]
        return [mean(cell["acceptance_length"] for cell in cells) for cells in told if all(cells)]

    @property
    def branched(self) -> "Rung":
        """The seeds that have trees."""
        return replace(
            self,
            records=tuple(
                one
                for one in self.records
                if any("tree" in form for form in one["sets"][self.sets[0]])
            ),
        )

    def positions(self, k: int) -> list[float]:
        """The share of passes that accepted draft i, mean over sets and seeds."""
        every = [
            one["sets"][name][f"K={k}"]["accepted_per_position"]
            for one in self.records
            for name in self.sets
        ]
        return [mean(shares) for shares in zip(*every, strict=True)]

    @property
    def engine(self) -> list[dict[str, Any]]:
        """Measured on the engine: of the first seed that was."""
        return next((one["engine"] for one in self.records if one.get("engine")), [])


def read_rungs(folder: Path) -> list[Rung]:
    """The folder's own, then those of its sub-folders."""
    return read_folder(folder) + [
        rung for path in sorted(folder.glob("*/")) for rung in read_folder(path, second=True)
    ]


def read_folder(folder: Path, second: bool = False) -> list[Rung]:
    """By target, in the ladder's order."""
    file = folder / "ladder.toml"
    order = (
        [run["name"] for run in tomllib.loads(file.read_text())["run"]] if file.is_file() else []
    )
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not {"name", "label", "target", "method"} <= record.keys():
            raise UserError(f"{path} is no record of tools/ladder.py: move it elsewhere")
        groups.setdefault((record["target"], record["name"]), []).append(record)
    rungs = [
        Rung(
            name,
            records[0]["label"],
            target,
            tuple(sorted(records, key=lambda one: one["seed"])),
            second,
        )
        for (target, name), records in groups.items()
    ]
    place = {name: i for i, name in enumerate(order)}
    return sorted(
        rungs, key=lambda rung: (rung.target, place.get(rung.name, len(place)), rung.name)
    )


def spread(values: list[float], digits: int = 2) -> str:
    """The mean; of several seeds, the least and the most too."""
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
            *(f"{one}, K=7" for one in sets),
        ]
    ]
    for rung in rungs:
        means = [spread(rung.lengths(k)) for k in KS]
        own = [spread(rung.lengths(7, name)) for name in sets]
        rows.append([rung.label, *means, against(mean(rung.lengths(7)), base), *own])
    return rows


def trees(rungs: list[Rung]) -> list[Row]:
    """Of the seeds that have them: a column a form, and what the tree adds to the chain of its depth."""
    forms = [("tree 15, ", 7), ("tree 31, ", 7), ("tree 31, ", 11)]
    rows: list[Row] = [
        ["drafter", "K=7", *(f"{tree}K={k}" for tree, k in forms), "tree 31 against K=7"]
    ]
    for rung in (
        rung.branched for rung in rungs if rung.trained and rung.lengths(7, tree="tree 31, ")
    ):
        own = [rung.lengths(k, tree=tree) for tree, k in forms]
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
            one = rung.first
            settings = (
                ", ".join(f"`{key}={told(value)}`" for key, value in one["settings"].items())
                or DASH
            )
            minutes = [spread([record[key] / 60 for record in rung.records], 1) for key in TIMES]
            numbers = [
                f"{one['steps']:,}",
                f"{one['target_tokens'] / 1e6:.1f} M",
                *minutes,
                one["device"],
            ]
            rows.append(
                [
                    rung.label,
                    str(len(rung.records)),
                    settings,
                    *numbers,
                    f"{one['bytes'] / 1e6:.1f}",
                ]
            )
    return rows


TIMES = ("seconds", "seconds_compiled")


def told(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def speeds(rungs: list[Rung]) -> list[Row]:
    every = sorted(
        {int(c) for rung in rungs for one in rung.engine for c in one["tokens_per_second"]}
    )
    rows: list[Row] = [
        [
            "drafter",
            "set",
            "drafts",
            *(f"c={c}" for c in every),
            "acceptance length",
            "step, ms",
            "against P-EAGLE's",
        ]
    ]
    base = {
        (one["set"], one["shape"]): one["step_ms"]
        for r in rungs
        if r.name == BASE
        for one in r.engine
    }
    for rung in sorted(rungs, key=lambda rung: rung.first["method"] != "none"):
        for one in rung.engine:
            shape = DASH if rung.first["method"] == "none" else one["shape"]
            cells = [amount(one["tokens_per_second"].get(str(c)), 0) for c in every]
            length, step = f"{one['acceptance_length']:.2f}", f"{one['step_ms']:.2f}"
            more = against(one["step_ms"], base.get((one["set"], one["shape"])))
            rows.append([rung.label, one["set"], shape, *cells, length, step, more])
    return rows


SECOND = re.compile(
    r"(tree \d+, )?K=\d+|K=7 against P-EAGLE|target tokens|minutes|MB|c=\d+"
)  # its columns


def second(rungs: list[Rung]) -> list[Row]:
    """A row a drafter, with columns of all the other tables; of the speeds, those of the first set and shape."""
    rows = {name: [name] for name in ("drafter", *(rung.label for rung in rungs))}
    for make in (lengths, trees, runs, speeds):
        found: dict[str, Row] = {}
        for row in make(rungs):
            found.setdefault(row[0], row)
        header = found["drafter"]
        at = [
            i
            for i, name in enumerate(header)
            if SECOND.fullmatch(name) and name not in rows["drafter"]
        ]
        for name, row in rows.items():
            row += [found[name][i] if name in found else DASH for i in at]
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
    """One for each target, under its name where there are several."""
    if name not in TABLES:
        raise UserError(f"no table {name!r}: the marker is one of {', '.join(TABLES)}")
    parts = []
    rungs = [rung for rung in rungs if rung.second == (name == "second")]
    targets = list(dict.fromkeys(rung.target for rung in rungs))
    for target in targets:
        header, *rows = TABLES[name]([rung for rung in rungs if rung.target == target])
        if rows:
            lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
            parts.append("\n".join(([f"{target}:", ""] if len(targets) > 1 else []) + lines))
    return "\n\n".join(parts) or NOTHING


def filled(text: str, rungs: list[Rung]) -> str:
    counts = {
        text.count("<!-- comparison:start"),
        text.count("<!-- comparison:end"),
        len(BLOCK.findall(text)),
    }
    if len(counts) > 1:
        raise UserError(
            "a comparison:start without its comparison:end (or the other way round): they stand in pairs"
        )
    return BLOCK.sub(lambda found: f"{found[1]}{table(found[2], rungs)}\n{found[4]}", text)


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
        after = filled(before, rungs)
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
