"""The speculative config of an endpoint's container, and why its drafter is off.

A container of vLLM drafts only if its environment names the drafter in one of CONFIG_VARIABLES.
SageMaker's SDK sets OPTION_SPECULATIVE_DRAFT_MODEL instead, which vLLM's engine ignores: the
drafter is downloaded and never used (pull request 6143 of aws/sagemaker-python-sdk).
"""

import json
from dataclasses import dataclass, field

from peagle.deploy.sagemaker.operate.clients import Clients, translate_aws_errors
from peagle.deploy.sagemaker.operate.status import configured_variants
from peagle.deploy.sagemaker.operate.wait import describe_endpoint
from peagle.deploy.sagemaker.resources.calls import Call
from peagle.deploy.verify.endpoint import Cause
from peagle.errors import UserError

VARIABLE = "SM_VLLM_SPECULATIVE_CONFIG"
CONFIG_VARIABLES = (VARIABLE, "OPTION_SPECULATIVE_CONFIG")  # of AWS's vLLM and LMI images
IGNORED_VARIABLE = "OPTION_SPECULATIVE_DRAFT_MODEL"
REQUIRED_KEYS = ("model", "num_speculative_tokens")
REDEPLOY = (
    "deploy with `peagle deploy sagemaker PAIR`, or create the model with boto3 and"
    f" {VARIABLE} as one line of JSON"
)


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """Image and environment of the container that serves."""

    image: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> str:
        return next((self.environment[v] for v in CONFIG_VARIABLES if v in self.environment), "")

    @property
    def defect(self) -> Cause | None:
        """Why this environment cannot turn drafting on; None if it does."""
        if not self.config and IGNORED_VARIABLE in self.environment:
            return Cause(
                f"the environment has {IGNORED_VARIABLE} and no {VARIABLE}: SageMaker's SDK sets"
                " it, but vLLM ignores it, so that the drafter is downloaded and never used",
                REDEPLOY,
            )
        if not self.config:
            return Cause(f"the environment of the model has no {VARIABLE}", REDEPLOY)
        if problem := config_problem(self.config):
            return Cause(f"the speculative config of the model is wrong: {problem}", REDEPLOY)
        return None

    @property
    def surely_off(self) -> bool:
        """AWS's vLLM image reads nothing but its environment; others may have defaults."""
        return "/vllm:" in self.image and self.defect is not None


def read_container(clients: Clients, name: str) -> ContainerSpec | None:
    """None if it cannot be read, for example without the permission to describe the endpoint."""
    try:
        with translate_aws_errors():
            endpoint = describe_endpoint(clients, name)
            if endpoint is None:
                return None
            variants = configured_variants(clients, endpoint["EndpointConfigName"])
            models = [variant["ModelName"] for variant in variants if "ModelName" in variant]
            if not models:
                return None
            call = Call("sagemaker", "DescribeModel", {"ModelName": models[0]})
            container = (clients.read(call) or {}).get("PrimaryContainer", {})
    except UserError:
        return None
    return ContainerSpec(container.get("Image", ""), container.get("Environment", {}))


def config_problem(text: str) -> str | None:
    """What is wrong with a speculative config; None if nothing is."""
    try:
        config = json.loads(text)
    except ValueError:
        return f"it is not JSON: {text[:80]!r}"
    if not isinstance(config, dict):
        return f"it is not an object: {text[:80]!r}"
    missing = [key for key in REQUIRED_KEYS if key not in config]
    return f"it has no {' and no '.join(missing)}" if missing else None
