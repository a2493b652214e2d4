"""The OpenAI frontend as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from omni_runtime.errors import OmniError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from omni_client.frontend.context import Context
from omni_client.frontend.edge import Edge
from omni_client.frontend.errors import ApiError, from_status, from_validation
from omni_client.frontend.metrics import Metrics
from omni_client.frontend.middleware import Admit, Attend, Authenticate, Observe
from omni_client.frontend.routes import chat, completions, health, models, speech, transcriptions
from omni_client.frontend.settings import Settings

ROUTES = (speech, transcriptions, chat, completions, models, health)


def create_app(settings: Settings) -> FastAPI:
    """The app for one Triton server; it connects when its lifespan starts."""
    metrics = Metrics()
    edge = Edge(settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await edge.start()
        try:
            yield
        finally:
            await edge.close()

    surrounds = [Middleware(Observe, metrics=metrics)]
    if settings.cors_origins:
        surrounds.append(
            Middleware(
                CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["GET", "POST"],
                allow_headers=["*"], expose_headers=["x-request-id", "x-seed", "retry-after"],
            )
        )  # fmt: skip
    paths = frozenset(route.path for module in ROUTES for route in module.router.routes if isinstance(route, APIRoute))
    surrounds.append(Middleware(Admit, limit=settings.max_connections, metrics=metrics, routes=paths))
    if settings.api_keys:
        surrounds.append(Middleware(Authenticate, keys=settings.api_keys))
    surrounds.append(
        Middleware(Attend, limit=settings.max_body_bytes, total=settings.max_held_bytes, timeout=settings.body_timeout)
    )
    app = FastAPI(
        title="Triton-Omni",
        description="OpenAI's routes over pipelines on a Triton Inference Server.",
        version=version("triton-omni"),
        lifespan=lifespan,
        middleware=surrounds,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.edge = edge
    for module in ROUTES:
        app.include_router(module.router)
    app.add_exception_handler(ApiError, _failed)
    app.add_exception_handler(OmniError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    return app


async def _failed(request: Request, error: Exception) -> Response:
    return Context.of(request).fail(error).response()


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return Context.of(request).fail(from_validation(error.errors())).response()


async def _refused(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: no such route, wrong method, a body that cannot be read."""
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        failure = from_status(error.status_code, request.method, request.url.path)
    else:
        failure = ApiError(error.status_code, str(error.detail), code="invalid_body")
    failure.headers |= dict(error.headers or {})
    return Context.of(request).fail(failure).response()
