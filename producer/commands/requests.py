"""Commands about one request: submit it, watch it, find its place, cancel it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer

from promptq.producer.clients.sync_client import Client
from promptq.producer.commands.client import open_client, open_client_of
from promptq.producer.commands.options import (
    AsJson,
    Detach,
    EventsAsJson,
    Model,
    Param,
    Priority,
    Queue,
    Redis,
    RequestId,
)
from promptq.shared.errors import InvalidRequestError, RequestNotFoundError
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.queue.request_queue import new_request_id
from promptq.shared.runtime.printable import write

_SET_BY_EMBED = [
    *("prompt", "messages", "texts", "embed", "pooling", "normalize", "dimensions"),
    *("request_id", "timeout"),
]


def submit(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; default or -: standard input."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of output tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep this many of the likeliest tokens.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Stop before this text; can be given several times."),
    ] = None,
    priority: Priority = None,
    deadline_ms: Annotated[
        int | None,
        typer.Option(help="Milliseconds after which the request ends if it is not done."),
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(metavar="replicated", help="Wait until the server's replicas have it."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a chat message: use the chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message of the chat; implies --chat.")
    ] = None,
    param: Param = None,
    request_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Id of the request; default: a new one."),
    ] = None,
    detach: Detach = False,
    as_json: EventsAsJson = False,
    model: Model = None,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Enqueue a request and print its output as it is generated. Ctrl-C cancels the request.

    Examples:

    promptq submit "Once upon a time" --max-tokens 64
    promptq submit --chat "Tell me a story about a fox." --temperature 0.7
    promptq submit --detach --priority -5 < prompt.txt
    promptq submit "Once" --json --param logprobs=2 --param 'stop_token_ids=[0]'
    """
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or None,
        "priority": priority,
        "deadline_ms": deadline_ms,
        "durability": durability,
    }
    taken = ["prompt", "messages"] if prompt is not None or chat or system is not None else []
    fields = _fields(options, param, ["request_id", *taken])
    if "prompt" not in fields and "messages" not in fields:
        fields |= _prompt_fields(prompt, chat, system)
    with open_client(redis, queue, model) as client:
        request_id = new_request_id() if request_id is None else request_id
        try:
            request_id = client.enqueue(request_id=request_id, **fields)
        except KeyboardInterrupt:
            client.cancel(request_id)
            raise
        _print_or_leave(client, request_id, detach=detach, as_json=as_json)


def fork(
    request_id: RequestId,
    at: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Continue after its first N tokens; default: after all so far."
        ),
    ] = None,
    append: Annotated[str, typer.Option(metavar="TEXT", help="Add this text after them.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens after these; default: the request's.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the request's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: a new one.")] = None,
    priority: Annotated[
        int | None, typer.Option(min=-1000, max=1000, help="Default: the request's.")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=JSON", help="Any other field to change.")
    ] = None,
    fork_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Id of the fork; default: a new one.")
    ] = None,
    detach: Detach = False,
    as_json: EventsAsJson = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Continue a request after its first tokens as a new request, and print the new text.

    The request may run or have ended. The fork repeats these tokens and continues
    with a new seed. Ctrl-C cancels the fork.

    Examples:

    promptq fork 0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10 --at 120
    promptq fork 0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10 --at 40 --append " But then"
    """
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "priority": priority,
    }
    changes = _fields(options, param, ["request_id", "fork_id", "at", "append"])
    fork_id = new_request_id() if fork_id is None else fork_id
    with open_client_of(redis, queue, request_id) as client:
        try:
            client.fork(request_id, at=at, append=append, fork_id=fork_id, **changes)
        except KeyboardInterrupt:
            client.cancel(fork_id)
            raise
        _print_or_leave(client, fork_id, detach=detach, as_json=as_json)


def embed(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT", help="The texts; if they are left out or are -, standard input."
        ),
    ] = None,
    pooling: Annotated[
        str | None, typer.Option(help="last or mean; default: as the model's files say.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="Keep this many numbers of each vector.")
    ] = None,
    normalize: Annotated[bool, typer.Option(help="Scale each vector to the length 1.")] = True,
    priority: Priority = None,
    param: Param = None,
    model: Model = None,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Turn texts into vectors and print each vector as a line of JSON. Ctrl-C cancels the requests.

    Examples:

    promptq embed "A fox in the snow"
    promptq embed "A fox" "A dog" --dimensions 256
    promptq embed --pooling mean < text.txt
    """
    fields = _fields({"priority": priority}, param, _SET_BY_EMBED)
    inputs = texts if texts and texts != ["-"] else [_prompt_fields(None, False, None)["prompt"]]
    own_id, is_one = new_request_id(), len(inputs) == 1
    with open_client(redis, queue, model) as client:
        try:
            result = client.embed(
                inputs[0] if is_one else inputs,
                pooling=cast("Any", pooling),
                normalize=normalize,
                dimensions=dimensions,
                request_id=own_id,
                **fields,
            )
        except KeyboardInterrupt:
            for nth in range(len(inputs)):
                client.cancel(own_id if is_one else f"{own_id}:{nth}")
            raise
    for vector in result.vectors:
        write(json.dumps(vector))


def watch(
    request_id: RequestId, as_json: EventsAsJson = False, redis: Redis = None, queue: Queue = None
) -> None:
    """Print a request's text from its beginning, and follow it while it is generated.

    Examples:

    promptq watch $(promptq submit --detach "Once upon a time")
    promptq watch 0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10 --json
    """
    from promptq.producer.commands.screens.printing import StreamPrinter

    with open_client_of(redis, queue, request_id) as client:
        raise typer.Exit(StreamPrinter(client, request_id, as_json).watch())


def place(
    request_id: RequestId, as_json: AsJson = False, redis: Redis = None, queue: Queue = None
) -> None:
    """Print how many requests wait in front of a request, and when it will start.

    Examples:

    promptq place 0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10
    """
    with open_client_of(redis, queue, request_id) as client:
        found = client.place(request_id)
    write(json.dumps({"id": request_id, **asdict(found)}) if as_json else str(found))


def cancel(request_id: RequestId, redis: Redis = None, queue: Queue = None) -> None:
    """Cancel a request: at once if it waits, at the next token if it runs.

    Examples:

    promptq cancel 0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10
    """
    with open_client_of(redis, queue, request_id) as client:
        status = client.cancel(request_id)
    if status is CancelStatus.UNKNOWN:
        raise RequestNotFoundError.of(request_id, client.queue.keys.queue)
    answers = {
        CancelStatus.CANCELLED: "cancelled",
        CancelStatus.FLAGGED: "cancelled; its worker ends it now",
        CancelStatus.FINISHED: "nothing changed: the request has already ended",
    }
    write(answers[status])


def _print_or_leave(client: Client, request_id: str, *, detach: bool, as_json: bool) -> None:
    """Prints the stream of an enqueued request; with `detach`, only the request's id."""
    if detach:
        write(json.dumps({"id": request_id}) if as_json else request_id)
        return
    from promptq.producer.commands.screens.printing import StreamPrinter

    raise typer.Exit(StreamPrinter(client, request_id, as_json).submit())


def _prompt_fields(prompt: str | None, chat: bool, system: str | None) -> dict[str, Any]:
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            print("Type the prompt; Ctrl-D ends it.", file=sys.stderr)
        prompt = sys.stdin.read().rstrip("\n")
    if not chat and system is None:
        return {"prompt": prompt}
    messages = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*messages, {"role": "user", "content": prompt}]}


def _fields(options: dict[str, Any], params: Param, taken: list[str]) -> dict[str, Any]:
    """Returns a request's fields: the `options` that are not None, and the fields of `--param`.

    Raises InvalidRequestError if a `--param` is no FIELD=JSON, or its field is set or `taken`.
    """
    fields = {name: value for name, value in options.items() if value is not None}
    for param in params or []:
        name, equals, text = param.partition("=")
        if not equals:
            raise InvalidRequestError(f"--param: {param!r} is not FIELD=JSON", field=name)
        if name in fields or name in taken:
            message = f"--param {name}: another option or argument sets this field"
            raise InvalidRequestError(message, field=name)
        try:
            fields[name] = json.loads(text)
        except ValueError:
            raise InvalidRequestError(
                f"{name}: {text!r} is not JSON; a text needs its quotes: '{name}=\"...\"'",
                field=name,
            ) from None
    return fields
