"""The OpenAPI document."""

from __future__ import annotations

from typing import Any

from openapi_spec_validator import OpenAPIV31SpecValidator

from tensorcast_dask.http.state.access import Need
from tensorcast_dask.http.state.openapi import document
from tensorcast_dask.http.state.routes import ROUTES


def made() -> Any:
    return document(root="/tensorcast", version="1.2.3")


def test_the_document_is_an_openapi_document() -> None:
    assert list(OpenAPIV31SpecValidator(made()).iter_errors()) == []
    assert made()["info"]["version"] == "1.2.3"
    assert made()["servers"] == [{"url": "/tensorcast"}]
    assert document(root="", version="1")["servers"] == [{"url": "/"}]


def test_it_has_every_route_and_no_other() -> None:
    said = {
        (method.upper(), path)
        for path, methods in made()["paths"].items()
        for method in methods
    }
    there = {(route.method, route.path) for route in ROUTES}
    bytes_path = "/v1/artifacts/{id}/tensors/{name}"
    assert said == there | {("HEAD", bytes_path)}


def test_it_says_where_the_token_may_be_left_out() -> None:
    paths = made()["paths"]
    for route in ROUTES:
        security = paths[route.path][route.method.lower()]["security"]
        assert ({} in security) == (route.need is Need.LOOK)
