"""Lists the models that a gateway's queues serve, as in the OpenAI API."""

from __future__ import annotations

from fastapi import APIRouter

from promptq.producer.admin.queue_views import not_served
from promptq.producer.calls.caller import Caller, check_model
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.errors import described
from promptq.producer.http.state import Gateway, ThisGateway
from promptq.shared.errors import ModelNotServedError

router = APIRouter(
    tags=["models"],
    responses=described(401, 403, 404, 503),
    dependencies=[needs("models")],
)


@router.get("/v1/models/", include_in_schema=False)  # otherwise '' would be read as a model's name
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
    """Returns the object of each model, by the model's name. If a model has several queues, the
    object has their shortest context length."""
    lengths: dict[str, list[int]] = {}
    for _, view in await gateway.queues.views():
        if view.model:
            lengths.setdefault(view.model, [])
            if view.max_model_len is not None:
                lengths[view.model].append(view.max_model_len)
    models = {name: _described(name, name, of) for name, of in lengths.items()}
    for alias, name in sorted((await gateway.queues.aliases()).items()):
        if name in lengths:
            models.setdefault(alias, _described(alias, name, lengths[name]))
    return models


def _described(name: str, root: str, lengths: list[int]) -> dict[str, object]:
    model: dict[str, object] = {"id": name, "object": "model", "created": 0}
    model |= {"owned_by": "promptq", "root": root}
    return {**model, "max_model_len": min(lengths)} if lengths else model


def _may_use(caller: Caller, model: str) -> bool:
    return caller.models is None or model in caller.models
