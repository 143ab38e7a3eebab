"""The model that the queue serves, as in the OpenAI API."""

from __future__ import annotations

from fastapi import APIRouter

from promptq.producer.gateway.answering.respond import unknown_model
from promptq.producer.gateway.context.access import ThisCaller, needs
from promptq.producer.gateway.context.gateway import ThisGateway
from promptq.producer.gateway.http.errors import described

router = APIRouter(
    tags=["models"],
    responses=described(401, 403, 404, 503),
    dependencies=[needs("models")],
)


@router.get("/v1/models")
async def list_models(gateway: ThisGateway, caller: ThisCaller) -> dict[str, object]:
    """List the queue's model, or nothing if no worker has ever come to the queue."""
    model = (await gateway.watch.look()).model
    return {"object": "list", "data": [_described(model)] if model else []}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, gateway: ThisGateway, caller: ThisCaller) -> dict[str, object]:
    """Describe the model of this name; 404 if the queue does not serve it."""
    served = (await gateway.watch.look()).model
    if model != served:
        raise unknown_model(model, served)
    return _described(model)


def _described(model: str) -> dict[str, object]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "promptq"}
