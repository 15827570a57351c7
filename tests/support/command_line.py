"""The command line, run in process."""

from typer.testing import CliRunner

from peagle.cli import app


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result.stdout if code == 0 else result.stderr
