"""From a call to the tokens of its prompt, which a worker tells and generates nothing."""

from __future__ import annotations

from fastapi import Request

from promptq.producer.gateway.answering.disconnects import while_present
from promptq.producer.gateway.answering.respond import Prepared, begin
from promptq.producer.gateway.context.access import Caller
from promptq.producer.gateway.context.gateway import Gateway
from promptq.producer.gateway.http.body_budget import Hold
from promptq.producer.gateway.http.errors import ApiError, ClientLeftError
from promptq.producer.gateway.openai.endings import failure
from promptq.shared.protocol.events import Result


async def told_tokens(
    request: Request,
    gateway: Gateway,
    caller: Caller,
    prepared: Prepared,
    hold: Hold | None = None,
) -> tuple[Result, int | None]:
    """What a worker tells of the prompt, and the model's length.

    Releases the hold on the body once the call is in the queue. Raises ApiError, PromptqError. If
    the client leaves, the request is cancelled.
    """
    served, completion, _ = await begin(gateway, caller, prepared)
    prepared.new.clear()
    if hold is not None:
        hold.release()
    try:
        async with while_present(request.receive):
            result = await served.client.result(completion.id, check=False)
    except ClientLeftError:
        gateway.cancels.cancel(served.client, completion.request_ids)
        raise
    if (error := failure(result.finish_reason, result.error, num_tokens=0)) is not None:
        raise error
    if result.prompt_texts is None:  # a stranger wrote into the queue
        raise ApiError(500, "the queue's record of this request has no tokens")
    return result, (await served.watch.look()).max_model_len
