import typer

from peagle.cli import app

deploy_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(deploy_app, name="deploy")


@deploy_app.callback()
def deploy() -> None:
    """Everything that starts a pair elsewhere: files for vLLM, compose, Kubernetes, Helm, KServe, Ray, SkyPilot."""
