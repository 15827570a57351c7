"""Error messages of the library name arguments; the command line replaces them by options."""

import errno
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from peagle.cli.application import CommandGroup, Commands, name_folder, name_options
from peagle.errors import UserError

single = typer.Typer()
KTokens = Annotated[int, typer.Option("--kv-tokens")]
K = Annotated[int, typer.Option("-k", "--k")]


@single.command()
def serve(pair: str, kv_tokens: KTokens = 1, k: K = 7) -> None: ...


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("lower `kv_tokens`", "lower --kv-tokens"),
        ("lower `kv_tokens` or raise `k`", "lower --kv-tokens or raise --k"),
        ("unknown `pair`", "unknown pair"),
        ("set `unknown_name`", "set `unknown_name`"),
        ("run `peagle pull` first", "run `peagle pull` first"),
        ("kv_tokens without backticks", "kv_tokens without backticks"),
    ],
)
def test_arguments_in_messages_become_options(message: str, expected: str) -> None:
    assert name_options(message, get_command(single)) == expected


def test_a_plural_option_matches_a_singular_argument() -> None:
    bench = typer.Typer()

    @bench.command()
    def methods(methods: Annotated[str, typer.Option("--methods")] = "") -> None: ...

    assert name_options("use `method` none", get_command(bench)) == "use --methods none"


def test_options_of_all_commands_of_a_group_are_known() -> None:
    group = typer.Typer()
    group.command("serve")(serve)
    group.command("other")(lambda: None)
    assert name_options("lower `kv_tokens`", get_command(group)) == "lower --kv-tokens"
    assert name_options("lower `kv_tokens`", None) == "lower `kv_tokens`"


def test_errors_of_a_command_name_its_options() -> None:
    app = typer.Typer(cls=Commands)

    @app.callback()
    def main() -> None: ...

    @app.command("serve")
    def failing(kv_tokens: KTokens = 1) -> None:
        raise UserError("raise `kv_tokens`")

    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2
    assert result.stderr == "error: raise --kv-tokens\n"


def test_an_unwritable_folder_is_reported_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer(cls=Commands)

    @app.callback()
    def main() -> None: ...

    @app.command("write")
    def write(folder: Path) -> None:
        folder.mkdir()

    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "x"
    result = CliRunner().invoke(app, ["write", str(folder)])
    fix = "another folder that can be written"
    assert result.exit_code == 2
    assert result.stderr == f"error: cannot use {folder} (Not a directory): choose {fix}\n"
    monkeypatch.setenv("PEAGLE_HOME", str(folder))
    result = CliRunner().invoke(app, ["write", str(folder / "targets")])
    assert result.stderr.endswith(f"(Not a directory): set PEAGLE_HOME to {fix}\n")


def test_other_os_errors_are_unchanged() -> None:
    for error in (OSError(errno.EMFILE, "Too many open files", "x"), OSError("cannot write x")):
        assert name_folder(error) == str(error)


def test_errors_in_a_nested_group_name_the_options_of_the_invoked_command() -> None:
    app = typer.Typer(cls=Commands)
    group = typer.Typer(cls=CommandGroup)
    app.add_typer(group, name="deploy")

    @group.callback()
    def deploy() -> None: ...

    @group.command("files")
    def files(out: Annotated[str, typer.Option("--out")] = "x") -> None:
        raise UserError("choose another `out` or `startup_seconds`")

    @group.command("endpoint")
    def endpoint(
        name: str, startup_seconds: Annotated[int, typer.Option("--startup-seconds")] = 1
    ) -> None:
        raise UserError("lower `startup_seconds`, or change `name` or `out`")

    @group.command("last")
    def last(name: Annotated[str, typer.Option("--name")] = "x") -> None: ...

    result = CliRunner().invoke(app, ["deploy", "files"])
    assert result.stderr == "error: choose another --out or `startup_seconds`\n"
    result = CliRunner().invoke(app, ["deploy", "endpoint", "x"])
    assert result.exit_code == 2
    assert result.stderr == "error: lower --startup-seconds, or change name or `out`\n"
