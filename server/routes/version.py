"""GET /version: of this server."""

from __future__ import annotations

from fastapi import APIRouter

from server import VERSION
from server.answers import Version

router = APIRouter()


@router.get("/version")
async def version() -> Version:
    return Version(version=VERSION)
