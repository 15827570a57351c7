"""Clients of AWS's services, made when first asked for; and AWS's errors as one line that names the fix."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from peagle.deploy.sagemaker import require_packages
from peagle.deploy.sagemaker.resources.calls import Call, Resource
from peagle.errors import UserError

ABSENT = re.compile(r"could not find|cannot find|does not exist", re.IGNORECASE)
ABSENT_CODES = (
    "ObjectNotFoundException",
    "ResourceNotFoundException",
    "ResourceNotFound",
    "404",
    "NoSuchKey",
)


class Clients:
    def __init__(self, region: str | None, profile: str | None = None) -> None:
        require_packages()
        self.region, self.profile = region, profile
        self._made: dict[str, Any] = {}

    @cached_property
    def session(self) -> Any:
        """With credentials; looking for them calls nobody but, on an AWS machine, its own metadata service."""
        import boto3

        with told():
            session = boto3.Session(region_name=self.region, profile_name=self.profile)
            if session.get_credentials() is None:
                raise UserError(
                    "no AWS credentials: run `aws configure`, set AWS_PROFILE, or give --profile"
                )
        if session.region_name is None:
            raise UserError("no region: give --region, or set AWS_REGION")
        return session

    def __getitem__(self, service: str) -> Any:
        if service not in self._made:
            from botocore.config import Config

            config = Config(
                retries={"mode": "standard", "max_attempts": 5}, user_agent_extra="peagle"
            )
            if (
                service == "sagemaker-runtime"
            ):  # an answer is not asked for twice, and may take its time
                config = Config(
                    retries={"total_max_attempts": 1}, read_timeout=600, user_agent_extra="peagle"
                )
            self._made[service] = self.session.client(service, config=config)
        return self._made[service]

    def call(self, call: Call) -> dict[str, Any]:
        from botocore import xform_name

        return getattr(self[call.service], xform_name(call.operation))(**call.parameters)

    def find(self, resource: Resource) -> dict[str, Any] | None:
        """What exists under the resource's name."""
        return self.look(resource.read, resource.found)

    def look(self, read: Call, path: str = "@") -> dict[str, Any] | None:
        import jmespath
        from botocore.exceptions import ClientError

        try:
            return jmespath.search(path, self.call(read))
        except ClientError as error:
            if absent(error):
                return None
            raise


def absent(error: Any) -> bool:
    """SageMaker has no code of its own for what is not there: the message says so."""
    code, message = (
        error.response["Error"].get("Code", ""),
        error.response["Error"].get("Message", ""),
    )
    return code in ABSENT_CODES or (code == "ValidationException" and bool(ABSENT.search(message)))


@contextmanager
def told() -> Iterator[None]:
    """What AWS or the way to it refuses is the user's to mend."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise UserError(reason(error)) from error


def reason(error: Exception) -> str:
    """One line; for what every deployer meets once, with the fix."""
    code = getattr(error, "response", {}).get("Error", {}).get("Code", type(error).__name__)
    text = " ".join(str(error).split())
    if code in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return (
            f"no AWS credentials ({text}): run `aws configure`, set AWS_PROFILE, or give --profile"
        )
    if code in (
        "ExpiredToken",
        "ExpiredTokenException",
        "UnauthorizedSSOTokenError",
        "SSOTokenLoadError",
    ):
        return f"the AWS credentials have expired ({text}): log in again, as with `aws sso login`"
    if code in ("InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch"):
        return (
            f"AWS does not know these credentials ({text}): check AWS_PROFILE and `aws configure`"
        )
    if code in ("EndpointConnectionError", "ConnectTimeoutError"):
        return f"AWS cannot be reached ({text}): check --region and the connection"
    if code == "ResourceLimitExceeded":
        return f"{text} (ask for more in the console, Service Quotas)"
    return text
