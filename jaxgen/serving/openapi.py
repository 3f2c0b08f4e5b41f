"""The OpenAPI document, made from the endpoints that are served and the models that they read."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from jaxgen.serving.endpoint import Endpoint
from jaxgen.serving.protocol.service import ErrorBody

_REFERENCE = "#/components/schemas/{model}"
_REFUSALS = {
    "400": "The request is at fault: error.param names the field.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "500": "The server is at fault.",
    "503": "Busy, starting or stopping: Retry-After says when to come back.",
}


def openapi_document(
    endpoints: Sequence[Endpoint], *, title: str, version: str, secured: bool
) -> dict[str, Any]:
    """OpenAPI 3.1; secured: keys are asked for."""
    models: dict[type[BaseModel], JsonSchemaMode] = {ErrorBody: "serialization"}
    for endpoint in endpoints:
        if endpoint.body is not None:
            models[endpoint.body] = "validation"
        if endpoint.answer is not None:
            models[endpoint.answer] = "serialization"
    references, definitions = models_json_schema(
        list(models.items()),
        ref_template=_REFERENCE,
    )
    schemas: dict[Any, Any] = {model: schema for (model, _), schema in references.items()}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, schemas, secured=secured and not endpoint.open)
        paths.setdefault(documented(endpoint.path), {})[endpoint.method.lower()] = operation
    components: dict[str, Any] = {"schemas": definitions.get("$defs", {})}
    if secured:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": components,
    }


def documented(path: str) -> str:
    """A route's path as OpenAPI writes it: parameters have names only."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _operation(endpoint: Endpoint, schemas: dict[Any, Any], *, secured: bool) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.media: {}}
    if endpoint.answer is not None:
        content = {"application/json": {"schema": schemas[endpoint.answer]}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    refused = {"application/json": {"schema": schemas[ErrorBody]}}
    statuses = _REFUSALS if endpoint.body is not None else {"401": _REFUSALS["401"]}
    if not endpoint.body and endpoint.path in ("/health", "/ready"):
        statuses = {"503": _REFUSALS["503"]}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}{endpoint.path.replace('/', '_')}",
        "responses": {
            "200": {"description": "Done.", "content": content},
            **{code: {"description": told, "content": refused} for code, told in statuses.items()},
        },
    }
    names = re.findall(r"\{(\w+)\}", documented(endpoint.path))
    if names:
        text = {"type": "string", "minLength": 1}
        told = {"in": "path", "required": True, "schema": text}
        operation["parameters"] = [{"name": name, **told} for name in names]
    if endpoint.body is not None:
        body = {"application/json": {"schema": schemas[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": body}
    if secured:
        operation["security"] = [{"key": []}]
    return operation
