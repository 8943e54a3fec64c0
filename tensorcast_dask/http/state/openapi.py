"""The OpenAPI document, written from the table of routes and the shapes of answers."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from tensorcast_dask.http.state import shapes
from tensorcast_dask.http.state.access import Need
from tensorcast_dask.http.state.routes import ROUTES, Form, Param, Route
from tensorcast_dask.tensors.plans import PlanSpec

__all__ = ["document"]

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"
Tree: TypeAlias = dict[str, Json]

_REF: Final = "#/components/schemas/{name}"
_KINDS: Final = {str: "string", int: "integer", float: "number", bool: "boolean"}
_ABOUT: Final = "Artifacts, nodes, signals and plans of a tensorcast cluster. Errors are those of docs/errors.md."
_RANGES: Final = ("Range", "If-Range", "If-None-Match")


def document(*, root: str, version: str) -> Tree:
    """Write it.

    Parameters
    ----------
    root : str
        Path below which the routes are served; "" for none.
    version : str
        Of this release.
    """
    made: dict[str, type[shapes.Shape]] = {
        route.shape.__name__: route.shape for route in ROUTES if route.shape is not None
    }
    types = [made[name] for name in sorted(made)] + [shapes.Failed]
    _, schemas = msgspec.json.schema_components(
        [*types, PlanSpec],
        ref_template=_REF,
        schema_hook=lambda _: {"description": "Any JSON."},
    )
    paths: Tree = {}
    for route in ROUTES:
        there = paths.setdefault(route.path, {})
        assert isinstance(there, dict), "a path has its methods"
        there[route.method.lower()] = _operation(route)
        if "HEAD" in route.methods and route.form is Form.BYTES:
            there["head"] = _operation(route, head=True)
    made_of: Tree = {
        "openapi": "3.1.0",
        "info": {"title": "tensorcast", "version": version, "description": _ABOUT},
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    plain: Tree = msgspec.json.decode(msgspec.json.encode(made_of))
    return plain


def _operation(route: Route, *, head: bool = False) -> Tree:
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.named
    ]
    parameters += [_parameter(param) for param in route.params]
    if route.form is Form.BYTES:
        parameters += [
            {"name": name, "in": "header", "schema": {"type": "string"}}
            for name in _RANGES
        ]
    operation: Tree = {
        "operationId": f"head_{route.name}" if head else route.name,
        "summary": route.says,
        "parameters": parameters,
        "security": _security(route),
        "responses": _responses(route, head=head),
    }
    if route.name == "submit_plan":
        body: Tree = {"schema": {"$ref": _REF.format(name="PlanSpec")}}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": body},
        }
    return operation


def _security(route: Route) -> Json:
    token: Tree = {"token": []}
    return [token, {}] if route.need is Need.LOOK else [token]


def _parameter(param: Param) -> Tree:
    schema: Tree = {"type": _KINDS[param.kind]}
    if param.kind in {int, float}:
        schema |= {"minimum": param.low, "maximum": param.high}
    if param.default is not None:
        schema["default"] = param.default
    if param.many:
        schema = {"type": "array", "items": schema}
    return {
        "name": param.name,
        "in": "query",
        "description": param.says,
        "schema": schema,
    }


def _responses(route: Route, *, head: bool) -> Tree:
    failed = _content("application/json", {"$ref": _REF.format(name="Failed")})
    responses: Tree = {"default": {"description": "An error.", **failed}}
    if route.form is Form.BYTES:
        raw = {} if head else _content("application/octet-stream", {})
        responses |= {
            "200": {"description": "All bytes.", **raw},
            "206": {"description": "A range of them.", **raw},
            "304": {"description": "Those of the tag given are the bytes still."},
            "416": {"description": "The range begins behind the end.", **failed},
        }
        return responses
    schema: Tree = (
        {"type": "object"}
        if route.shape is None
        else {"$ref": _REF.format(name=route.shape.__name__)}
    )
    kind = "application/json" if route.form is Form.JSON else "text/event-stream"
    content = _content(kind, schema)
    responses[str(route.status)] = {"description": route.says, **content}
    return responses


def _content(kind: str, schema: Tree) -> Tree:
    return {"content": {kind: {"schema": schema}}}
