"""The package follows its style: short lines, and functions of at most 50 lines."""

from pathlib import Path

from tools.code_style import MAX_FUNCTION, FileStyle, python_files, read_style

PACKAGE = Path(__file__).parents[2] / "peagle"
MAX_LONG_LINES = 0.01  # fraction of all lines
# Typer commands, whose options are their parameters: their current numbers of lines.
LONG_COMMANDS = {
    ("cli/deployment/deploy_sagemaker.py", "sagemaker"): 52,
    ("cli/measurement/bench.py", "bench"): 54,
    ("cli/measurement/evaluate.py", "evaluate"): 57,
    ("cli/serving/serve.py", "serve"): 72,
    ("cli/training/capture.py", "capture"): 64,
    ("cli/training/make_drafter.py", "make_drafter"): 68,
    ("cli/training/regenerate.py", "regenerate"): 95,
}


def package_styles() -> list[FileStyle]:
    return [read_style(path) for path in python_files(PACKAGE)]


def long_functions(styles: list[FileStyle]) -> list[str]:
    """Functions that are too long, except Triton kernels and the listed commands."""
    return [
        f"{style.path.relative_to(PACKAGE)}: {name}() has {lines} lines"
        for style in styles
        for name, lines, _ in style.functions
        if not name.endswith("_kernel")
        and lines > LONG_COMMANDS.get((str(style.path.relative_to(PACKAGE)), name), MAX_FUNCTION)
    ]


def test_lines_are_short() -> None:
    styles = package_styles()
    long_lines = sum(len(style.long_lines) for style in styles)
    assert long_lines <= MAX_LONG_LINES * sum(style.lines for style in styles)


def test_functions_are_short() -> None:
    assert long_functions(package_styles()) == []


def test_a_long_function_and_a_long_line_are_found(tmp_path: Path) -> None:
    body = "    x = 1\n" * MAX_FUNCTION
    source = tmp_path / "source.py"
    source.write_text(f"def f():\n{body}\n\ndef g():\n{body[10:]}\n# {'x' * 99}\n")
    style = read_style(source)
    sizes = {name: lines for name, lines, _ in style.functions}
    assert sizes == {"f": MAX_FUNCTION + 1, "g": MAX_FUNCTION}
    assert style.long_lines == [len(source.read_text().splitlines())]
