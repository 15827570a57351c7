"""DeployOptions: what the user asks for; a field that is None takes the pair's default."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeployOptions:
    k: int | None = None
    concurrency: int | None = None  # expected concurrent requests, from which K is chosen
    drafter: str | None = None  # a hub id or a folder
    method: str | None = None
    vllm: str | None = None  # version of vLLM
    context: int | None = None  # maximum tokens of a prompt and its answer
    gpus: int = 1  # GPUs of each replica
    gpu: str | None = None  # GPU type
    replicas: int = 1
    port: int = 8000
    name: str | None = None
    served_model_name: str | None = None
    image: str | None = None
    learn: bool = False  # `peagle serve --learn` in `image` instead of vLLM
