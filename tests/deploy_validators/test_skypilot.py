"""The SkyServe file is valid for the JSON schemas and the service spec of SkyPilot."""

from typing import Any

import pytest

pytest.importorskip("sky", reason="SkyPilot is not installed: run `make test-deploy`")

import jsonschema
from sky.serve.service_spec import SkyServiceSpec
from sky.utils import schemas

from tests.support.deploy.deploying import PAIRS, documents, planned, rendered

pytestmark = pytest.mark.deploy


def validate(task: dict[str, Any]) -> None:
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["service"], schemas.get_service_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    "options", [{}, {"gpus": 2, "replicas": 3, "gpu": "H100", "port": 9000}], ids=["plain", "big"]
)
def test_the_task_is_valid(pair: str, options: dict[str, Any]) -> None:
    task = documents(rendered("skypilot", pair, **options))["service.yaml"]
    deployment = planned("skypilot", pair, **options)
    validate(task)
    service = SkyServiceSpec.from_yaml_config(task["service"])
    assert service.readiness_path == "/health" and service.min_replicas == deployment.replicas
    assert task["resources"]["ports"] == deployment.port
    name, count = str(task["resources"]["accelerators"]).split(":")
    assert int(count) == deployment.gpus and name == (deployment.gpu or f"{deployment.gpu_gb}GB+")


@pytest.mark.parametrize(
    "part", [("service", "readiness"), ("resources", "accelerator"), ("resources", "port")]
)
def test_the_schemas_are_strict(part: tuple[str, str]) -> None:
    task = documents(rendered("skypilot"))["service.yaml"]
    task[part[0]][part[1]] = "x"
    with pytest.raises(jsonschema.ValidationError, match=part[1]):
        validate(task)
