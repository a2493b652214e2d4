"""The OpenAI frontend: HTTP and JSON on one side, KServe over gRPC to a Triton server on the other.

settings      what one frontend is told at start
app           the ASGI application: routes, middleware, error handlers
server        uvicorn around it; `serve`
middleware    request id, log and metrics · admission · key · body limit and disconnects
catalog       which pipelines there are, asked from the server
edge          what the routes share, and how they call a pipeline
fields, schemas    what each route accepts, and what it refuses by name
routes        one module per OpenAI resource
"""

from __future__ import annotations

from omni_client.frontend.command import register
from omni_client.frontend.settings import Settings

__all__ = ["Settings", "register"]
