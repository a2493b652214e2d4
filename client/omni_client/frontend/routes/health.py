"""Health, version and metrics."""

from __future__ import annotations

from importlib.metadata import version as distribution_version
from typing import Any

from fastapi import APIRouter, Request
from omni_runtime.errors import OmniError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from omni_client.frontend.edge import Edge
from omni_client.frontend.errors import ApiError

router = APIRouter(tags=["server"])


@router.get("/health")
@router.get("/health/live")
async def live() -> dict[str, str]:
    """This process answers; it says nothing about Triton."""
    return {"status": "ok"}


@router.get("/health/ready")
async def ready(request: Request, model: str | None = None) -> Response:
    """200 when every pipeline (or `model`, a name or alias) and every stage it calls is loaded, else 503."""
    catalog = Edge.of(request).catalog
    try:
        states = await catalog.states()
    except OmniError as error:
        return JSONResponse({"status": "unavailable", "reason": str(error), "pipelines": {}}, 503)
    if model is not None:
        name = catalog.aliases.get(model, model)
        if name not in states:
            there = ", ".join(states) or "none"
            raise ApiError(
                404, f"there is no model {model!r}; there are {there}", param="model", code="model_not_found"
            )
        states = {name: states[name]}
    good = bool(states) and all(state["state"] == "ready" for state in states.values())
    return JSONResponse({"status": "ready" if good else "unavailable", "pipelines": states}, 200 if good else 503)


@router.get("/version")
async def version(request: Request) -> dict[str, Any]:
    """This frontend's version, and the server's, as far as it can be reached."""
    try:
        metadata = await Edge.of(request).connection.metadata()
        server = {"name": metadata.get("name"), "version": metadata.get("version")}
    except OmniError:
        server = None
    return {"version": distribution_version("triton-omni"), "triton": server}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Triton's metrics, when they can be read, followed by the frontend's."""
    edge = Edge.of(request)
    return Response(await edge.metrics.page(edge.settings.metrics_url), media_type=CONTENT_TYPE_LATEST)
