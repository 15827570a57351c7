"""The console script `serve`: how SageMaker starts a container."""

import os
import sys

from peagle.cli.application import app
from peagle.server.sagemaker import serve_arguments, is_sagemaker_environment


def main() -> None:
    """Run `peagle serve`, with options from the environment of a SageMaker container."""

    words = [] if is_sagemaker_environment() else serve_arguments(os.environ)
    app(["serve", *words, *sys.argv[1:]], prog_name="peagle")
