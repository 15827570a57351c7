"""Rendering of a Deployment to files: each kind has a folder of templates.

The template `NEXT` is not a file of the deployment: it lists the commands to run next.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from peagle import __version__
from peagle.deploy.spec import Deployment
from peagle.deploy.version import RAY_VERSION, RAY_VLLM
from peagle.errors import UserError
from peagle.paths import write_text

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
NEXT_STEPS = "NEXT"


def render(kind: str, deployment: Deployment) -> dict[str, str]:
    """File name -> text. A template that renders to nothing gives no file."""
    names = sorted(
        path.name for path in (TEMPLATE_FOLDER / kind).iterdir() if path.name != NEXT_STEPS
    )
    texts = {name: render_template(f"{kind}/{name}", deployment) for name in names}
    return {name: text for name, text in texts.items() if text.strip()}


def next_steps(kind: str, deployment: Deployment, out: Path) -> str:
    """The shell commands that start the deployment written to `out`."""
    return render_template(f"{kind}/{NEXT_STEPS}", deployment, out=quote(str(out)))


def render_template(template: str, deployment: Deployment, **variables: str) -> str:
    kind = template.split("/")[0]
    if kind == "vllm":  # vLLM runs on the host itself: nothing is mounted
        drafter = "./drafter" if deployment.local_drafter else deployment.drafter
        deployment = replace(
            deployment, drafter=drafter, target=deployment.target_folder or deployment.target
        )
    return (
        template_environment()
        .get_template(template)
        .render(
            d=deployment,
            kind=kind,
            version=__version__,
            ray_version=RAY_VERSION,
            ray_vllm=RAY_VLLM,
            **variables,
        )
    )


@cache
def template_environment() -> Environment:
    environment = Environment(  # no autoescaping: none of the files is HTML
        loader=FileSystemLoader(TEMPLATE_FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"json": json.dumps, "yaml": yaml_scalar, "shell": quote}
    return environment


def yaml_scalar(value: Any) -> str:
    """The value as YAML on one line, quoted where necessary."""
    return (
        yaml.safe_dump(value, width=float("inf"), allow_unicode=True).removesuffix("...\n").strip()
    )


def changed_files(files: dict[str, str], out: Path, force: bool) -> dict[Path, str]:
    """The files to write. Identical files are skipped, others are replaced only with `force`."""
    changed = {}
    for name, text in files.items():
        path = out / name
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file: choose another `out`")
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != text:
            changed[path] = text
    if existing := [path.name for path in changed if path.exists() and not force]:
        raise UserError(
            f"{out} holds other versions of {', '.join(existing)}: `force` replaces them"
        )
    return changed


def write_files(files: dict[Path, str]) -> None:
    for path, text in files.items():
        write_text(path, text, executable=path.suffix == ".sh")
