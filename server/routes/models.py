"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

from fastapi import APIRouter, Request

from server.answers import Model, ModelList
from server.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    return ModelList(data=[_model(service_of(request))])


@router.get("/v1/models/{name:path}")  # a hub id has a slash
async def get_model(request: Request, name: str) -> Model:
    service = service_of(request)
    service.check_model(name)
    return _model(service)


def _model(service: Service) -> Model:
    return Model(id=service.settings.model_name, created=service.created, max_model_len=service.max_model_len)
