"""Serves the number of workers that each queue should have, for autoscalers such as KEDA."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from redis.exceptions import RedisError

from promptq.producer.admin.autoscaling import Scaling, scaling
from promptq.producer.admin.autoscaling_defaults import TARGET_SECONDS
from promptq.producer.http.errors import described
from promptq.producer.http.state import ThisGateway
from promptq.shared.errors import RedisSideError, SpoiltRecordError
from promptq.shared.protocol.keys import NAME, Keys
from promptq.shared.queue.call import carry_out_async

router = APIRouter(tags=["metrics"], responses=described(404, 503))


class ScalingOfQueues(BaseModel):
    """For each queue, the number of workers that it should have."""

    queues: list[Scaling]


@router.get("/scaling")
async def scale(
    gateway: ThisGateway,
    queue: Annotated[
        str | None, Query(pattern=NAME, description="Only this queue; default: all.")
    ] = None,
    target_seconds: Annotated[
        float, Query(gt=0, le=86_400, description="How long a request should wait at most.")
    ] = TARGET_SECONDS,
) -> ScalingOfQueues:
    """Returns the number of workers that each queue should have, and the reason.

    Name a queue in `queue` if it has never had a worker, so that its first worker can be started.
    """
    if queue is None:
        names = [served.name for served, _ in await gateway.queues.views()]
    elif gateway.queues.may_serve(queue):
        names = [queue]
    else:
        names = [(await gateway.queues.named(queue)).name]
    scalings: list[Scaling] = []
    for name in names:
        try:
            operation = scaling(Keys(name), target_seconds)
            scalings.append(await carry_out_async(operation, gateway.queue.run))
        except (RedisError, RedisSideError, SpoiltRecordError):
            if len(names) == 1:  # of several queues, one that cannot be read is left out
                raise
    return ScalingOfQueues(queues=scalings)
