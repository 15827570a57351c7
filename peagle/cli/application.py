"""The typer application: the order of commands, errors as one line, and output helpers.

Every command has its own file. Only commands that need torch import it.
"""

import errno
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from peagle import __version__
from peagle.errors import UserError
from peagle.paths import cache_home

COMMAND_ORDER = (
    *("catalog", "pairs", "pull"),
    *("generate", "demo", "serve", "doctor"),
    *("evaluate", "bench", "report", "compare", "cost", "tune", "bench-step"),
    *("make-drafter", "regenerate", "capture", "train", "learn"),
    *("export", "quantize", "check", "deploy", "sagemaker", "verify"),
)

INVOKED_COMMAND = "peagle.invoked_command"  # key in the meta dictionary of the click context

# Where a folder cannot be written. Input files that do not exist are errors of their readers.
FOLDER_ERRORS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC),
)

out = Console()
err = Console(stderr=True)


def warn(line: str) -> None:
    err.print(f"[yellow]{escape(line)}[/]", highlight=False, soft_wrap=True)


class CommandGroup(TyperGroup):
    """A group that records which command was invoked, so that errors can name its options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        ctx.meta[INVOKED_COMMAND] = command  # shared by nested contexts: the innermost one remains
        return name, command, rest


class Commands(CommandGroup):
    """The group of all commands. A mistake of the user gives one line and exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMAND_ORDER)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Complete the arguments of `serve`.

        In a SageMaker container, options come from the environment; typed options follow and take
        precedence. Arguments after `--` are passed to vLLM.
        """
        if args[:1] == ["serve"]:
            from peagle.server.sagemaker import (
                forward_to_vllm,
                is_sagemaker_environment,
                serve_arguments,
            )

            end = args.index("--") if "--" in args else len(args)
            args = [
                "serve",
                *(serve_arguments(os.environ) if is_sagemaker_environment() else []),
                *args[1:end],
                *forward_to_vllm(args[end + 1 :]),
            ]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (UserError, OSError) as error:  # OSError: a full disk, a read-only folder
            text = name_folder(error) if isinstance(error, OSError) else str(error)
            message = name_options(text, ctx.meta.get(INVOKED_COMMAND))
            err.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            err.print("\ninterrupted")
            raise typer.Exit(130) from None


def name_folder(error: OSError) -> str:
    """What the system refused, and the fix if that is another folder."""
    if error.errno not in FOLDER_ERRORS or not error.filename:
        return str(error)
    path, home = Path(str(error.filename)), cache_home()
    is_cache = path.is_relative_to(home) or home.is_relative_to(path)
    choose = "set PEAGLE_HOME to" if is_cache else "choose"
    return f"cannot use {path} ({error.strerror}): {choose} another folder that can be written"


def name_options(message: str, command: Any) -> str:
    """Replace the arguments of the library in a message by the options of `command`.

    A name in backticks that is not an option of the command stays. An option may take several
    values, as --methods of `peagle bench` does. Example, for `peagle serve`: "lower `kv_tokens`"
    -> "lower --kv-tokens".
    """
    options = option_names(command)

    def option(match: re.Match[str]) -> str:
        name = match[1]
        return options.get(name) or options.get(f"{name}s") or match[0]

    return re.sub(r"`(\w+)`", option, message)


def option_names(command: Any) -> dict[str, str]:
    """Parameter name -> option; for a group of commands, those of all its commands."""
    names: dict[str, str] = {}
    for subcommand in getattr(command, "commands", {}).values():
        names |= option_names(subcommand)
    for param in getattr(command, "params", []):
        names[param.name] = next((o for o in param.opts if o.startswith("--")), param.opts[0])
    return names


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"peagle {__version__}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Parallel speculative decoding: a drafter guesses K tokens in one pass, the target checks them
    in one pass, and the answer is the target's own, token by token."""
