"""The command line. One file a command; torch is imported only by those that need it."""

import os
import re
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from peagle import __version__
from peagle.errors import UserError

TRAINING = ["make-drafter", "regenerate", "capture", "train"]

out = Console()
err = Console(stderr=True)


def warn(line: str) -> None:
    err.print(f"[yellow]{escape(line)}[/]", highlight=False, soft_wrap=True)


class Commands(TyperGroup):
    """A user's mistake is one line and exit code 2, never a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        measuring = ["evaluate", "bench", "report", "compare", "cost", "tune", "bench-step"]
        running = ["generate", "demo", "serve"]
        shipping = ["export", "quantize", "check", "deploy", "sagemaker"]
        return ["catalog", "pairs", "pull", *running, *measuring, *TRAINING, *shipping]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """In a SageMaker container the environment tells `serve` what to do; what is typed has the last word.

        What stands behind `--` is for vLLM.
        """
        if args[:1] == ["serve"]:
            from peagle.server.sagemaker import serve_arguments, is_sagemaker_environment, forward_to_vllm

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
            message = name_options(str(error), self.get_command(ctx, ctx.invoked_subcommand or ""))
            err.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            err.print("\ninterrupted")
            raise typer.Exit(130) from None


def name_options(message: str, command: Any) -> str:
    """Replace arguments of the library by the options of `command`.

    >>> name_options("lower `kv_tokens`", command)  # doctest: +SKIP
    'lower --kv-tokens'
    """
    options = {
        param.name: next((word for word in param.opts if word.startswith("--")), param.opts[0])
        for param in getattr(command, "params", [])
    }
    return re.sub(r"`(\w+)`", lambda name: options.get(name[1], name[0]), message)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"peagle {__version__}")
        raise typer.Exit


@app.callback()
def main(
    show: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Parallel speculative decoding: a drafter guesses K tokens in one pass, the target checks them in one pass,
    and the answer is the target's own, token by token."""
