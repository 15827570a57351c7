"""Clients of the AWS services, created on first use, and AWS errors as one line with the fix."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from peagle.deploy.sagemaker import require_packages
from peagle.deploy.sagemaker.resources.calls import Call, Resource
from peagle.errors import UserError

USER_AGENT = "peagle"
INVOKE_TIMEOUT_SECONDS = 600
NOT_FOUND_MESSAGE = re.compile(r"could not find|cannot find|does not exist", re.IGNORECASE)
NOT_FOUND_CODES = (
    "ObjectNotFoundException",
    "ResourceNotFoundException",
    "ResourceNotFound",
    "404",
    "NoSuchKey",
)
MISSING_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")
EXPIRED_CREDENTIALS = (
    "ExpiredToken",
    "ExpiredTokenException",
    "UnauthorizedSSOTokenError",
    "SSOTokenLoadError",
)
UNKNOWN_CREDENTIALS = (
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "SignatureDoesNotMatch",
)
CREDENTIALS_FIX = "run `aws configure`, set AWS_PROFILE, or give `profile`"


class Clients:
    """The boto3 clients of a region, by service name."""

    def __init__(self, region: str | None, profile: str | None = None) -> None:
        require_packages()
        self.region = region
        self.profile = profile
        self._clients: dict[str, Any] = {}

    @cached_property
    def session(self) -> Any:
        """A boto3 session that has credentials.

        The search for credentials uses no network, except the metadata service of an AWS machine.
        """
        import boto3

        with translate_aws_errors():
            session = boto3.Session(region_name=self.region, profile_name=self.profile)
            if session.get_credentials() is None:
                raise UserError(f"no AWS credentials: {CREDENTIALS_FIX}")
        if session.region_name is None:
            raise UserError("no region: give `region`, or set AWS_REGION")
        return session

    @cached_property
    def account(self) -> str:
        """The AWS account of the credentials."""
        with translate_aws_errors():
            return str(self["sts"].get_caller_identity()["Account"])

    def __getitem__(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self.session.client(service, config=client_config(service))
        return self._clients[service]

    def call(self, call: Call) -> dict[str, Any]:
        from botocore import xform_name

        return getattr(self[call.service], xform_name(call.operation))(**call.parameters)

    def find(self, resource: Resource) -> dict[str, Any] | None:
        """The existing resource of that name; None if there is none."""
        return self.read(resource.read, resource.result_path)

    def read(self, call: Call, result_path: str = "@") -> dict[str, Any] | None:
        """The part of the response at the JMESPath; None if AWS answers "not found"."""
        import jmespath
        from botocore.exceptions import ClientError

        try:
            return jmespath.search(result_path, self.call(call))
        except ClientError as error:
            if is_not_found(error):
                return None
            raise


def client_config(service: str) -> Any:
    """Retries for all services but invocation: a request for an answer is never repeated."""
    from botocore.config import Config

    if service == "sagemaker-runtime":
        return Config(
            retries={"total_max_attempts": 1},
            read_timeout=INVOKE_TIMEOUT_SECONDS,
            user_agent_extra=USER_AGENT,
        )
    return Config(retries={"mode": "standard", "max_attempts": 5}, user_agent_extra=USER_AGENT)


def is_not_found(error: Any) -> bool:
    """Whether AWS says that the resource does not exist.

    SageMaker has no error code for it: only the message of its ValidationException says so.
    """
    code = error.response["Error"].get("Code", "")
    message = error.response["Error"].get("Message", "")
    if code == "ValidationException":
        return bool(NOT_FOUND_MESSAGE.search(message))
    return code in NOT_FOUND_CODES


def is_denied(error: Any) -> bool:
    """Whether AWS refuses the call; for HEAD requests, the status is the only code."""
    return error.response["Error"].get("Code", "") in ("403", "AccessDenied")


@contextmanager
def translate_aws_errors() -> Iterator[None]:
    """Raise errors of AWS and of the connection to it as UserError."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise UserError(error_message(error)) from error


def error_message(error: Exception) -> str:
    """One line about an AWS error; common ones name the fix."""
    code = getattr(error, "response", {}).get("Error", {}).get("Code", type(error).__name__)
    text = " ".join(str(error).split())
    if code in MISSING_CREDENTIALS:
        return f"no AWS credentials ({text}): {CREDENTIALS_FIX}"
    if code in EXPIRED_CREDENTIALS:
        return f"the AWS credentials have expired ({text}): log in again, as with `aws sso login`"
    if code in UNKNOWN_CREDENTIALS:
        return (
            f"AWS does not know these credentials ({text}): check AWS_PROFILE and `aws configure`"
        )
    if code in ("EndpointConnectionError", "ConnectTimeoutError"):
        return f"AWS cannot be reached ({text}): check `region` and the connection"
    if code == "ResourceLimitExceeded":
        return f"{text} (request an increase in the console, Service Quotas)"
    return text
