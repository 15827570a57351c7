"""The OpenAPI document: request bodies and error responses.

FastAPI cannot derive them, because the server reads bodies itself (limits.py).
"""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

SCHEMA_REFERENCE = "#/components/schemas/{model}"
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "The request is invalid or not supported; the message says why.",
        401: "The API key is missing or wrong.",
        403: "The request comes from a web page of another origin.",
        404: "There is no such model.",
        408: "The body was not received in time.",
        413: "The body is too long.",
        415: "The body is not JSON.",
        429: "The queue is full: try again.",
        503: "The server is loading, restarting or shutting down.",
        504: "The answer took too long.",
    }.items()
}


def describe_body(*models: type[BaseModel]) -> dict[str, Any]:
    """Describe a JSON body that is one of `models`."""
    refs = [{"$ref": SCHEMA_REFERENCE.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_body_schemas(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Add the schemas of the bodies to the OpenAPI document."""
    build_document = app.openapi

    def openapi() -> dict[str, Any]:
        document = build_document()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in models:
            schema = model.model_json_schema(ref_template=SCHEMA_REFERENCE)
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign]
