"""Actions of administrators on a queue. The log names the administrator of each action."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from promptq.producer.calls.call import CompletionCall
from promptq.producer.calls.call_to_payloads import prepare
from promptq.producer.calls.caller import check_model, check_scope
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.gateway.dashboard.pages import ThisQueue
from promptq.producer.http.auth import ThisAdmin, is_of_own_page
from promptq.producer.http.json_body import json_body
from promptq.producer.http.rate_limits import admit_call
from promptq.producer.http.state import ThisGateway
from promptq.producer.http.submit import IncomingCall
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.replies import CancelStatus, PriorityStatus
from promptq.shared.protocol.request import MAX_PRIORITY
from promptq.shared.queue.request_queue import new_request_id
from promptq.shared.runtime.logs import get_logger


async def same_origin(request: Request) -> None:
    """Prevents other web sites from acting through an administrator's browser. Raises ApiError 403.

    While no key exists, a gateway trusts all programs on its machine, including browsers. Without
    this check, every page in these browsers could act. A browser sends the origin of the page with
    each request. Other programs send no origin, and are not refused.
    """
    if not is_of_own_page(request):
        raise ApiError(403, "another web site may not do this", code="cross_site")


router = APIRouter(
    prefix="/dashboard/api", include_in_schema=False, dependencies=[Depends(same_origin)]
)

MAX_DEAD = 1000
"""The most dead letters that one action handles."""


class One(BaseModel):
    """The id of a request or a worker."""

    id: str


class Move(One):
    """A request and its new priority."""

    priority: int = Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)


class DeadLetters(BaseModel):
    """The dead letters with these ids, or if `all` is set, the latest MAX_DEAD dead letters."""

    ids: list[str] = Field([], max_length=MAX_DEAD, fail_fast=True)
    all: bool = False


async def admin_log(request: Request, admin: ThisAdmin, served: ThisQueue) -> Any:
    """Returns a function, `log(action=...)`, that logs an action with the administrator's name and
    address. Raises ApiError 403 for other callers."""
    address = request.client.host if request.client else ""
    return partial(
        get_logger().info,
        "done from the dashboard",
        by=admin.name,
        address=address,
        queue=served.name,
    )


AdminLog = Annotated[Any, Depends(admin_log)]
ThisOne = Annotated[One, Depends(json_body(One))]
TheseLetters = Annotated[DeadLetters, Depends(json_body(DeadLetters))]


@router.post("/cancel")
async def cancel(log: AdminLog, served: ThisQueue, one: ThisOne) -> dict[str, str]:
    """Cancel a request: at once if it waits, at the next token if it runs."""
    status = await served.client.cancel(one.id)
    log(action="cancel", request_id=one.id, status=status.value)
    if status is CancelStatus.UNKNOWN:
        raise RequestNotFoundError(f"no request {one.id!r} is known")
    return {"status": status.value}


@router.post("/reprioritise")
async def reprioritise(
    log: AdminLog, served: ThisQueue, move: Annotated[Move, Depends(json_body(Move))]
) -> dict[str, str]:
    """Move a waiting request to another priority."""
    status = await served.client.reprioritise(move.id, move.priority)
    log(action="reprioritise", request_id=move.id, priority=move.priority, status=status.value)
    if status is PriorityStatus.UNKNOWN:
        raise RequestNotFoundError(f"no request {move.id!r} waits")
    return {"status": status.value}


@router.post("/pause")
async def pause(log: AdminLog, served: ThisQueue) -> dict[str, bool]:
    """Stop handing out requests. Running requests finish."""
    await served.client.pause()
    log(action="pause")
    return {"paused": True}


@router.post("/resume")
async def resume(log: AdminLog, served: ThisQueue) -> dict[str, bool]:
    """Hand out requests again."""
    await served.client.resume()
    log(action="resume")
    return {"paused": False}


@router.post("/drain")
async def drain(log: AdminLog, served: ThisQueue, one: ThisOne) -> dict[str, list[str]]:
    """Make one worker finish its running requests and exit."""
    draining = await served.client.drain(one.id)
    log(action="drain", worker_id=one.id, told=len(draining))
    if not draining:
        raise RequestNotFoundError(f"no worker {one.id!r} is alive")
    return {"told": draining}


@router.post("/dead/requeue")
async def requeue(
    log: AdminLog, served: ThisQueue, letters: TheseLetters
) -> dict[str, dict[str, str]]:
    """Enqueue dead letters again. Returns the new ids by old ids. Skips missing letters."""
    new_ids = {}
    for dead_id in await _chosen(served, letters):
        try:
            new_ids[dead_id] = await served.client.requeue(dead_id)
        except RequestNotFoundError:
            continue
        log(action="requeue", request_id=dead_id, new_id=new_ids[dead_id])
    return {"requeued": new_ids}


@router.post("/dead/purge")
async def purge(log: AdminLog, served: ThisQueue, letters: TheseLetters) -> dict[str, int]:
    """Delete dead letters. Returns their number."""
    chosen = await _chosen(served, letters)
    count = await served.client.purge(chosen)
    log(action="purge", request_ids=chosen, purged=count)
    return {"purged": count}


@router.post("/play")
async def play(
    request: Request,
    log: AdminLog,
    admin: ThisAdmin,
    gateway: ThisGateway,
    served: ThisQueue,
    fields: Annotated[dict[str, Any], Depends(json_body(dict[str, Any]))],
) -> dict[str, str]:
    """Enqueue a request of the playground. The body has the fields of a payload."""
    check_scope(admin, "completions")
    call = CompletionCall(is_chat="messages" in fields, fields=fields, prompts=[None])
    prepared = prepare(call, admin, new_request_id(), await gateway.queues.aliases())
    check_model(admin, (await served.view()).model)
    await admit_call(gateway, admin)
    (request_id,), _ = await IncomingCall(request, gateway, admin, prepared).enqueue(served)
    log(action="play", request_id=request_id)
    return {"id": request_id}


async def _chosen(served: ServedQueue, letters: DeadLetters) -> list[str]:
    return await served.client.dead_ids(MAX_DEAD) if letters.all else letters.ids
