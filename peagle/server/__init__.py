"""An OpenAI and SageMaker endpoint over the engine; see docs/serve.md."""

from importlib.util import find_spec

from peagle.errors import UserError

REQUIRED_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "zmq", "msgspec")


def require_packages() -> None:
    """Check that the packages of the extra `peagle[serve]` are installed."""
    if missing := [name for name in REQUIRED_PACKAGES if find_spec(name) is None]:
        raise UserError(f"peagle serve needs {', '.join(missing)}: pip install 'peagle[serve]'")
