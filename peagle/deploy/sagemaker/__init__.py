"""Deployment of a pair as a SageMaker endpoint, with boto3 alone. See docs/sagemaker.md.

EndpointSettings -> Stack (API calls, as data) -> dry run: JSON | CloudFormation | Terraform
                                               -> apply: upload, create or update, wait;
                                                  on failure, roll back
"""

from importlib.util import find_spec

from peagle.errors import UserError


def require_packages() -> None:
    """boto3 is an optional dependency: fail with the command that installs it."""
    if find_spec("boto3") is None:
        raise UserError("this needs boto3: pip install 'peagle[deploy]'")
