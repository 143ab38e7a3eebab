"""OpenAI's list of models: those that the gateway's queues serve."""

from __future__ import annotations

from fastapi import APIRouter

from promptq.producer.admin.queue_views import QueueView, not_served
from promptq.producer.calls.caller import Caller, check_model
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.errors import described
from promptq.producer.http.state import Gateway, ThisGateway
from promptq.shared.errors import ModelNotServedError

router = APIRouter(
    tags=["models"], responses=described(401, 403, 404, 503), dependencies=[needs("models")]
)


@router.get("/v1/models/", include_in_schema=False)  # otherwise the model '' would be described
@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(gateway: ThisGateway, caller: ThisCaller) -> dict[str, object]:
    """List the models and their aliases. Queues without a model are left out."""
    models = (await _models(gateway)).values()
    data = [model for model in models if _may_use(caller, str(model["root"]))]
    return {"object": "list", "data": data}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, gateway: ThisGateway, caller: ThisCaller) -> dict[str, object]:
    """Describe the model of this name; 404 if no queue serves it."""
    models = await _models(gateway)
    if model not in models:
        usable = (name for name in models if _may_use(caller, name))
        raise ModelNotServedError(not_served(model, usable))
    check_model(caller, str(models[model]["root"]))
    return models[model]


async def _models(gateway: Gateway) -> dict[str, dict[str, object]]:
    """Maps each model's name and aliases to the object that describes the model. If several queues
    serve a model, the object has the shortest context length of these queues, and lists each field
    that at least one of them refuses."""
    views: dict[str, list[QueueView]] = {}
    for _, view in await gateway.queues.views():
        if view.model:
            views.setdefault(view.model, []).append(view)
    models = {name: _described(name, name, of) for name, of in views.items()}
    for alias, name in sorted((await gateway.queues.aliases()).items()):
        if name in views:
            models.setdefault(alias, _described(alias, name, views[name]))
    return models


def _described(name: str, root: str, views: list[QueueView]) -> dict[str, object]:
    model: dict[str, object] = {"id": name, "object": "model", "created": 0}
    model |= {"owned_by": "promptq", "root": root}
    model["refused_fields"] = sorted({field for view in views for field in view.refused})
    lengths = [view.max_model_len for view in views if view.max_model_len is not None]
    return {**model, "max_model_len": min(lengths)} if lengths else model


def _may_use(caller: Caller, model: str) -> bool:
    return caller.models is None or model in caller.models
