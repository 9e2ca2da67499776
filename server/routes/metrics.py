"""GET /metrics: the engine's numbers for Prometheus. Wants the API key, if there is one."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.metrics import exposition
from server.service import service_of

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(
        await exposition(service_of(request).engine, request.app.state.registry), media_type=CONTENT_TYPE_LATEST
    )
