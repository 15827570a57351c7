"""SageMakerEndpoint: an endpoint of SageMaker, as `peagle verify` asks it."""

import time
from functools import cached_property

from peagle.deploy.sagemaker.operate.clients import Clients
from peagle.deploy.sagemaker.operate.invoke import invoke_stream
from peagle.deploy.sagemaker.operate.spec_log import observe_log
from peagle.deploy.sagemaker.operate.speculation import ContainerSpec, read_container
from peagle.deploy.sagemaker.resources.stack import LOG_GROUP_PREFIX
from peagle.deploy.verify.answer import Answer, chat_request, read_answer
from peagle.deploy.verify.endpoint import Cause, Observation, Observe


class SageMakerEndpoint:
    kind = "sagemaker"
    model = ""  # a container answers requests without a name
    has_switch = False

    def __init__(self, clients: Clients, name: str) -> None:
        self.clients = clients
        self.name = name
        self.evidence_fix = (
            f"allow logs:FilterLogEvents for {LOG_GROUP_PREFIX}{name}, or deploy vLLM 0.32 or later"
            " with --env SM_VLLM_PER_REQUEST_SPEC_DECODE_METRICS=summary"
        )

    @cached_property
    def container(self) -> ContainerSpec | None:
        return read_container(self.clients, self.name)

    def ask(self, prompt: str, max_tokens: int, drafts: bool = True) -> Answer:
        client = self.clients["sagemaker-runtime"]
        return read_answer(invoke_stream(client, self.name, chat_request(prompt, max_tokens)))

    def watch(self) -> Observe:
        """SageMaker passes on nothing but /invocations: the log of the container is read."""
        since_ms = int(time.time() * 1000)

        def observe() -> Observation | None:
            observation = observe_log(self.clients["logs"], self.name, since_ms)
            if observation is None and self.container is not None and self.container.surely_off:
                return Observation("configuration", None)
            return observation

        return observe

    def explain(self, has_counters: bool) -> Cause:
        if self.container is None:
            return Cause(
                "the environment of the model cannot be read",
                "allow sagemaker:DescribeEndpoint, DescribeEndpointConfig and DescribeModel, and"
                " verify again",
            )
        return self.container.defect or Cause(
            "the model has a speculative config, but its container does not draft",
            f"read the start of the container: `peagle sagemaker logs {self.name} --since 1d`;"
            " its vLLM must support the pair",
        )
