"""GET /v1/models, /v1/models/{id}, /v1/audio/voices: what the server says it has."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from omni_client.frontend.catalog import Catalog, Pipeline
from omni_client.frontend.edge import Edge
from omni_client.frontend.errors import ApiError

router = APIRouter(tags=["models"])


def _model(catalog: Catalog, name: str, pipeline: Pipeline) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": catalog.created,
        "owned_by": "triton-omni",
        # Beyond OpenAI's fields: which routes it is for, and the pipeline behind an alias.
        "task": pipeline.task,
        "root": pipeline.name,
    }


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """Every pipeline, and every alias of one."""
    catalog = Edge.of(request).catalog
    named = catalog.names(await catalog.pipelines())
    return {"object": "list", "data": [_model(catalog, name, pipeline) for name, pipeline in named.items()]}


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> dict[str, Any]:
    catalog = Edge.of(request).catalog
    named = catalog.names(await catalog.pipelines())
    if model not in named:
        there = ", ".join(named) or "none"
        raise ApiError(404, f"there is no model {model!r}; there are {there}", param="model", code="model_not_found")
    return _model(catalog, model, named[model])


@router.get("/v1/audio/voices")
async def voices(request: Request) -> dict[str, Any]:
    """The voices of every pipeline that speaks; `default` and leaving it out mean the first of a model."""
    pipelines = await Edge.of(request).catalog.pipelines()
    data = [
        {"id": voice, "object": "voice", "model": pipeline.name, "default": voice == pipeline.voices[0]}
        for pipeline in pipelines.values()
        for voice in pipeline.voices
    ]
    return {"object": "list", "data": data, "voices": list(dict.fromkeys(voice["id"] for voice in data))}
