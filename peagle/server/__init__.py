"""An OpenAI and SageMaker endpoint over the engine. See docs/serve.md; nothing else in the package needs this one."""

from importlib.util import find_spec

from peagle.errors import UserError

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def require_packages() -> None:
    """The server's packages are an extra: who lacks them is told how to get them."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise UserError(f"peagle serve needs {', '.join(missing)}: pip install 'peagle[serve]'")
