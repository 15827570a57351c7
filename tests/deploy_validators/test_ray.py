"""The Ray Serve file is valid for the models of Ray: the deploy schema and LLMConfig."""

from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: run `make test-deploy`")

from pydantic import ValidationError
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.serve.schema import DeploymentSchema, ServeDeploySchema

from tests.support.deploy.deploying import KEYS, PAIRS, documents, planned, rendered

pytestmark = pytest.mark.deploy


def llm_config(pair: str, **options: Any) -> dict[str, Any]:
    parsed = documents(rendered("ray", pair, **options))["serve.yaml"]
    schema = ServeDeploySchema.model_validate(parsed)
    assert schema.http_options.port == planned("ray", pair, **options).port
    application = schema.applications[0]
    assert application.import_path == "ray.serve.llm:build_openai_app"
    return application.args["llm_configs"][0]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    "options", [{}, {"gpus": 2, "replicas": 3, "gpu": "H100", "port": 9000}], ids=["plain", "big"]
)
def test_the_llm_config_is_valid(pair: str, options: dict[str, Any]) -> None:
    config = LLMConfig(**llm_config(pair, **options))
    deployment = planned("ray", pair, **options)
    assert set(config.engine_kwargs["speculative_config"]) == KEYS
    assert config.engine_kwargs["tensor_parallel_size"] == deployment.gpus
    assert set(config.deployment_config) <= set(DeploymentSchema.model_fields), (
        "LLMConfig does not validate these fields"
    )
    assert config.deployment_config["num_replicas"] == deployment.replicas
    assert config.model_loading_config.model_source == deployment.target
    assert config.accelerator_type == deployment.gpu


def test_the_models_are_strict() -> None:
    config = llm_config("gpt-oss-20b")
    with pytest.raises(ValidationError, match="engine_kwarg"):
        LLMConfig(**config, engine_kwarg={})
    with pytest.raises(ValidationError, match="model_loading_config"):
        LLMConfig(**config | {"model_loading_config": {"model_id": "a", "source": "b"}})
