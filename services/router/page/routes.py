"""``/``, ``/status.json`` and ``/metrics``: for people and scrapers; not part of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.router.fleet import FleetView
from services.router.page.schema import Status
from services.router.page.status import status_of
from services.router.recorder import Recorder

_FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
# Nothing from anywhere else, and nobody may frame it.
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def page_routes(model: str, view: Callable[[], FleetView], recorder: Recorder) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    folder = resources.files("services.router.page")
    contents = {name: folder.joinpath(name).read_bytes() for name in _FILES}

    def file(name: str) -> Response:
        return Response(contents[name], media_type=_FILES[name], headers=_HEADERS)

    @routes.get("/")
    async def index() -> Response:
        return file("index.html")

    @routes.get("/page/{name}")
    async def asset(name: str) -> Response:
        return file(name) if name in contents else Response(status_code=404)

    @routes.get("/status.json")
    async def status() -> Status:
        return status_of(model, view(), recorder)

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        body, content_type = recorder.metrics.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return routes
