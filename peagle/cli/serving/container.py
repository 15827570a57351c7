"""The console script `serve`, with which SageMaker starts a container."""

import os
import sys

from peagle.cli.application import app
from peagle.server.sagemaker import is_sagemaker_environment, serve_arguments


def main() -> None:
    """Run `peagle serve` with options from the environment of a SageMaker container."""
    # Where SM_VLLM_* variables are set, the command itself adds the options (application.py).
    arguments = [] if is_sagemaker_environment() else serve_arguments(os.environ)
    app(["serve", *arguments, *sys.argv[1:]], prog_name="peagle")
