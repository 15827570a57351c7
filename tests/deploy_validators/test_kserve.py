"""The InferenceService is valid for the models of KServe and Kubernetes."""

import importlib
import re
import sys
import types
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest

try:
    PLACE = str(distribution("kserve").locate_file("kserve"))
except PackageNotFoundError:
    pytest.skip("KServe is not installed: run `make test-deploy`", allow_module_level=True)

import kubernetes.client

from tests.support.deploy.deploying import PAIRS, documents, planned, rendered

pytestmark = pytest.mark.deploy

# Import only the models: the package itself imports dependencies of the KServe server.
sys.modules["kserve"] = types.ModuleType("kserve")
sys.modules["kserve"].__path__ = [PLACE]
models = importlib.import_module("kserve.models")


def check(kind: str, value: Any, where: str) -> None:
    """`kind` is the OpenAPI name of a type, in the spelling of the generated models."""
    if match := re.fullmatch(r"(?:list\[|dict\(str, )(.*)[\])]", kind):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            check(match[1], item, f"{where}.{key}")
        return
    model = getattr(models, kind, None) or getattr(kubernetes.client, kind, None)
    if model is None or not hasattr(model, "openapi_types"):
        if kind in ("str", "int", "bool"):
            assert type(value).__name__ == kind, (where, kind, value)
        return
    assert isinstance(value, dict), (where, kind)
    fields = {
        outside: model.openapi_types[inside] for inside, outside in model.attribute_map.items()
    }
    for key, item in value.items():
        assert key in fields, f"{where} ({kind}) has no field {key!r}"
        check(fields[key], item, f"{where}.{key}")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    "options", [{}, {"gpus": 2, "replicas": 3, "gpu": "H100", "port": 9000}], ids=["plain", "big"]
)
def test_the_inference_service_is_valid(pair: str, options: dict[str, Any]) -> None:
    parsed = documents(rendered("kserve", pair, **options))
    deployment = planned("kserve", pair, **options)
    service = parsed["inferenceservice.yaml"]
    check("V1beta1InferenceService", service, "service")
    predictor = service["spec"]["predictor"]
    assert (
        predictor["minReplicas"] == deployment.replicas
        and predictor["containers"][0]["name"] == "kserve-container"
    )


@pytest.mark.parametrize(
    "way",
    [["spec"], ["spec", "predictor"], ["spec", "predictor", "containers", 0, "readinessProbe"]],
)
def test_the_models_refuse_unknown_fields(way: list[Any]) -> None:
    service = documents(rendered("kserve"))["inferenceservice.yaml"]
    place = service
    for step in way:
        place = place[step]
    place["nonsense"] = 1
    with pytest.raises(AssertionError, match="nonsense"):
        check("V1beta1InferenceService", service, "service")
