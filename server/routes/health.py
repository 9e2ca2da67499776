"""GET /health: 200 while the engine process is alive and answers, else 503. Open even when API keys are set."""

from __future__ import annotations

from fastapi import APIRouter, Request

from server.answers import Health
from server.service import service_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Health:
    service_of(request).check_alive()
    return Health()
