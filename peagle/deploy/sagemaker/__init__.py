"""A pair as a SageMaker endpoint, with boto3 alone. See docs/sagemaker.md.

choices -> stack (calls, as data) -> dry run: JSON | CloudFormation | Terraform
                                  -> apply: upload, create or update, wait; or everything back
"""

from importlib.util import find_spec

from peagle.errors import UserError


def require_packages() -> None:
    """boto3 is an extra: who lacks it is told how to get it."""
    if find_spec("boto3") is None:
        raise UserError("this needs boto3: pip install 'peagle[deploy]'")
