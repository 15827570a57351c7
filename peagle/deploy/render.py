"""From a Deployment to files: every template of a kind's folder, filled in. `NEXT` is what to run, and is printed."""

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
from peagle.deploy.version import RAY, RAYS
from peagle.errors import UserError
from peagle.paths import write_text

TEMPLATES = Path(__file__).parent / "templates"
NEXT = "NEXT"


def render(kind: str, deployment: Deployment) -> dict[str, str]:
    """File name -> text; a template that has nothing to say here makes no file."""
    names = sorted(path.name for path in (TEMPLATES / kind).iterdir() if path.name != NEXT)
    texts = {name: filled(f"{kind}/{name}", deployment) for name in names}
    return {name: text for name, text in texts.items() if text.strip()}


def next_steps(kind: str, deployment: Deployment, out: Path) -> str:
    return filled(f"{kind}/{NEXT}", deployment, out=quote(str(out)))


def filled(template: str, deployment: Deployment, **more: str) -> str:
    kind = template.split("/")[0]
    if kind == "vllm":  # on the host itself nothing is mounted
        drafter = "./drafter" if deployment.local_drafter else deployment.drafter
        deployment = replace(
            deployment, drafter=drafter, target=deployment.target_folder or deployment.target
        )
    return (
        environment()
        .get_template(template)
        .render(d=deployment, kind=kind, version=__version__, ray=RAY, rays=RAYS, **more)
    )


@cache
def environment() -> Environment:
    made = Environment(  # none of this is HTML
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"json": json.dumps, "yaml": yaml_scalar, "shell": quote}
    return made


def yaml_scalar(value: Any) -> str:
    """On one line, quoted where it must be."""
    return (
        yaml.safe_dump(value, width=float("inf"), allow_unicode=True).removesuffix("...\n").strip()
    )


def differing(files: dict[str, str], out: Path, force: bool) -> dict[Path, str]:
    """What has to be written: files that are the same already are left alone, others are replaced only by `force`."""
    changed = {}
    for name, text in files.items():
        path = out / name
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no file: choose another --out")
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != text:
            changed[path] = text
    if there := [path.name for path in changed if path.exists() and not force]:
        raise UserError(f"{out} holds other versions of {', '.join(there)}: --force replaces them")
    return changed


def write(changed: dict[Path, str]) -> None:
    for path, text in changed.items():
        write_text(path, text, executable=path.suffix == ".sh")
