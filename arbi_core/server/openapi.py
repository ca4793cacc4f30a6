"""The OpenAPI 3.1 document, made from the request schemas. Torch-free: ``arbi openapi`` prints it without a model."""

from __future__ import annotations

from typing import Any

from arbi_core import __version__
from arbi_core.server.schemas.base import json_schema
from arbi_core.server.schemas.requests import ChatRequest, CompletionRequest

__all__ = ["build_openapi"]

ERRORS = {
    "400": "The request cannot be served as written.",
    "403": "Not for this caller.",
    "404": "The model is not served here.",
    "408": "The request's timeout passed.",
    "409": "The job runs already, or was begun with another request.",
    "413": "The body is too large.",
    "429": "The queue is full; Retry-After says when to try again.",
    "500": "The server failed on this request.",
    "503": "The server is shutting down.",
}


_TENANT_HEADER = {
    "name": "X-Cache-Tenant",
    "in": "header",
    "required": False,
    "description": "Whose prefix cache and limits apply.",
    "schema": {"type": "string", "maxLength": 256},
}


def build_openapi() -> dict[str, Any]:
    """Describe every route of the core."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "arbi",
            "version": __version__,
            "description": "OpenAI-compatible inference server.",
        },
        "paths": {
            "/v1/chat/completions": {"post": _generation("Answer a conversation", "ChatRequest")},
            "/v1/completions": {"post": _generation("Complete a prompt", "CompletionRequest")},
            "/v1/admin/cache/flush": {"post": _flush()},
            "/v1/models": {"get": _get("The served models")},
            "/v1/models/{name}": {
                "get": {
                    **_get("One model", "404"),
                    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
                }
            },
            "/health": {"get": _get("Whether the process answers")},
            "/health/ready": {"get": _get("Whether requests are served", "503")},
            "/version": {"get": _get("Version of the server")},
            "/metrics": {"get": _get("Prometheus metrics", content="text/plain")},
            "/openapi.json": {"get": _get("This document")},
        },
        "components": {
            "schemas": {
                "ChatRequest": json_schema(ChatRequest),
                "CompletionRequest": json_schema(CompletionRequest),
                "Error": _error_schema(),
            }
        },
    }


def _error_schema() -> dict[str, Any]:
    text, nullable = {"type": "string"}, {"type": ["string", "null"]}
    inner = {"message": text, "type": text, "param": nullable, "code": nullable}
    return {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": list(inner), "properties": inner}},
    }


def _error(code: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": ERRORS[code], "content": {"application/json": {"schema": schema}}}


def _generation(summary: str, schema: str) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {
                "description": "The answer; server-sent events under stream: true.",
                "content": {"application/json": {}, "text/event-stream": {}},
            },
            **{code: _error(code) for code in ERRORS if code != "403"},
        },
        "parameters": [_TENANT_HEADER],
    }


def _flush() -> dict[str, Any]:
    tenant = {"name": "tenant", "in": "query", "required": False, "schema": {"type": "string"}}
    summary = "Forget the prefix cache of one tenant, or of all; answers callers on the server's own machine only"
    return {**_get(summary, "400", "403", "503"), "parameters": [tenant]}


def _get(summary: str, *errors: str, content: str = "application/json") -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": summary, "content": {content: {}}}}
    for code in errors:
        plain = {"description": "Not ready; the body has the reason.", "content": {"application/json": {}}}
        responses[code] = plain if code == "503" else _error(code)
    return {"summary": summary, "responses": responses}
