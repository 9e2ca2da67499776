"""GET /health: 200 while the engine is alive. GET /ready: 200 while it takes new work. Else 503.

Both are open even when API keys are set. A supervisor restarts what is not alive; a load balancer sends nothing to what
is not ready, which a server that ends its last answers is not.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from server.answers import Health
from server.service import service_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Health:
    service_of(request).check_alive()
    return Health()


@router.get("/ready")
async def ready(request: Request) -> Health:
    service_of(request).check_ready()
    return Health()
