"""Measure how the code reads: the table of the style guide, for any folder of Python files.

python -m tools.code_style peagle            # the table
python -m tools.code_style peagle --list     # and the places to look at, file by file
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

MAX_LINE = 100
MAX_FUNCTION = 50
MAX_FILES = 15
VAGUE_NAMES = {
    "found",
    "told",
    "one",
    "at",
    "held",
    "made",
    "said",
    "news",
    "how",
    "wanted",
    "most",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class FileStyle:
    path: Path
    lines: int = 0
    functions: list[tuple[str, int, bool]] = field(default_factory=list)  # name, lines, return type
    long_lines: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    assignments: int = 0
    tuple_assignments: int = 0
    vague: Counter[str] = field(default_factory=Counter)


def read_style(path: Path) -> FileStyle:
    text = path.read_text(encoding="utf-8")
    style = FileStyle(path, lines=len(text.splitlines()))
    style.long_lines = [
        number for number, line in enumerate(text.splitlines(), 1) if len(line) > MAX_LINE
    ]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            style.functions.append((node.name, length, node.returns is not None))
        elif isinstance(node, ast.Assign):
            style.assignments += 1
            pairs = [t for t in node.targets if isinstance(t, ast.Tuple)]
            style.tuple_assignments += bool(pairs and isinstance(node.value, ast.Tuple))
        for name in assigned_names(node):
            style.names.append(name)
            if name in VAGUE_NAMES:
                style.vague[name] += 1
    return style


def assigned_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
        yield node.arg


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def table(styles: list[FileStyle]) -> list[tuple[str, str]]:
    functions = [function for style in styles for function in style.functions]
    lines = sum(style.lines for style in styles)
    long_lines = sum(len(style.long_lines) for style in styles)
    names = [name for style in styles for name in style.names]
    assignments = sum(style.assignments for style in styles)
    pairs = sum(style.tuple_assignments for style in styles)
    rooms = Counter(style.path.parent for style in styles if style.path.name != "__init__.py")
    typed = mean(returns for _, _, returns in functions)
    return [
        ("files / lines", f"{len(styles)} / {lines:,}"),
        (
            "median file / function, lines",
            f"{median(style.lines for style in styles):.0f}"
            f" / {median(length for _, length, _ in functions):.0f}",
        ),
        ("functions over 50 lines", str(sum(size > MAX_FUNCTION for _, size, _ in functions))),
        ("return types", f"{typed:.0%}"),
        ("lines over 100 characters", f"{long_lines / lines:.1%}"),
        ("mean length of an assigned name", f"{mean(map(len, names)):.1f}"),
        ("`a, b = x, y` among assignments", f"{pairs / max(1, assignments):.1%}"),
        ("vague names", str(sum(style.vague.total() for style in styles))),
        ("most files in one room", str(max(rooms.values()))),
    ]


def list_places(styles: list[FileStyle]) -> None:
    for style in styles:
        notes = [f"{name}() has {size} lines" for name, size, _ in style.functions if size > 50]
        notes += [f"{name} x {count}" for name, count in style.vague.most_common()]
        if style.long_lines:
            notes.append(f"long lines {', '.join(map(str, style.long_lines))}")
        if style.tuple_assignments:
            notes.append(f"{style.tuple_assignments} tuple assignments")
        if notes:
            print(f"{style.path}: {'; '.join(notes)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("peagle"))
    parser.add_argument("--list", action="store_true", help="also list the places to look at")
    options = parser.parse_args()
    styles = [read_style(path) for path in python_files(options.folder)]
    if options.list:
        list_places(styles)
    for name, value in table(styles):
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
