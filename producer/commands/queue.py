"""Commands about a queue: statistics, pause, resume, drain, priorities, dead letters."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from promptq.producer.admin.autoscaling_defaults import TARGET_SECONDS
from promptq.producer.clients.sync_client import Client
from promptq.producer.commands.client import names_queue, open_client, open_client_of
from promptq.producer.commands.options import AsJson, Queue, Redis, RequestId, Target
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.replies import PriorityStatus
from promptq.shared.runtime.printable import write

dead = typer.Typer(
    name="dead",
    no_args_is_help=True,
    help="Dead letters: requests that were given up because they crash their workers.",
)
DeadIds = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of dead letters.")]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]
_ALL = 2**31


def stats(as_json: AsJson = False, redis: Redis = None, queue: Queue = None) -> None:
    """Show the state of the queue and its workers.

    Examples:

    promptq stats
    promptq stats --json | jq .waiting
    """
    with open_client(redis, queue) as client:
        statistics = client.stats()
    if as_json:
        write(statistics.model_dump_json(indent=2))
        return
    from rich.text import Text

    from promptq.producer.commands.screens.render import queue_table, why_no_worker, workers_tables
    from promptq.producer.commands.screens.terminal import SafeConsole

    console = SafeConsole()
    console.print(queue_table(statistics))
    if statistics.server_warning:
        console.print(Text(f"warning: {statistics.server_warning}\n", style="bold yellow"))
    if workers := [*statistics.workers, *statistics.overflow_workers]:
        console.print(workers_tables(workers, console.width))
    if not statistics.workers:
        console.print(why_no_worker(statistics))


def scaling(
    target_seconds: Target = TARGET_SECONDS,
    as_json: AsJson = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Show how many workers a queue needs, and why; without --queue, for all queues.

    Times are the seconds that one worker would need. `promptq supervise` and
    `promptq up --workers 1-4` follow these numbers.

    Examples:

    promptq scaling
    promptq scaling --queue chat --json | jq .desired
    """
    with open_client(redis, queue) as client:
        if names_queue(queue):
            scalings = [client.scaling(target_seconds)]
        else:
            scalings = client.scalings(target_seconds)
    if as_json:
        dumped = [one.model_dump(mode="json") for one in scalings]
        write(json.dumps(dumped[0] if names_queue(queue) else dumped, indent=2))
        return
    from promptq.producer.commands.screens.render import scaling_table
    from promptq.producer.commands.screens.terminal import console_for_list

    console_for_list().print(scaling_table(scalings))


def pause(as_json: AsJson = False, redis: Redis = None, queue: Queue = None) -> None:
    """Stop handing out requests. New requests wait, running requests finish.

    Examples:

    promptq pause --queue chat
    """
    with open_client(redis, queue) as client:
        client.pause()
    write(json.dumps({"paused": True}) if as_json else "paused: requests are accepted and wait")


def resume(as_json: AsJson = False, redis: Redis = None, queue: Queue = None) -> None:
    """Hand out requests again after a pause.

    Examples:

    promptq resume --queue chat
    """
    with open_client(redis, queue) as client:
        client.resume()
    write(json.dumps({"paused": False}) if as_json else "resumed")


def drain(
    worker: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only this worker; `promptq stats` shows the ids."),
    ] = None,
    as_json: AsJson = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Drain workers, like SIGTERM: they stop claiming, finish running requests and exit.

    A supervisor such as `promptq up` may start them again.
    To stop the queue, pause it first.

    Examples:

    promptq drain
    promptq drain --worker host-4711-a1b2c3
    """
    with open_client(redis, queue) as client:
        draining = client.drain(worker)
        if worker is not None and not draining:
            alive = ", ".join(one.worker_id for one in client.stats().workers) or "none"
            raise RequestNotFoundError(f"no worker {worker!r} is alive; these are: {alive}")
    if as_json:
        write(json.dumps({"workers": draining}))
        return
    lines = [f"{worker_id} finishes its requests and exits" for worker_id in draining]
    write("\n".join(lines) or "no worker is alive")


def reprioritise(
    request_id: RequestId,
    priority: Annotated[int, typer.Option(min=-1000, max=1000, help="Lower runs sooner.")],
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Change the priority of a waiting request, and so its place in the queue.

    Examples:

    promptq reprioritise 0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10 --priority -5
    """
    with open_client_of(redis, queue, request_id) as client:
        status = client.reprioritise(request_id, priority)
    if status is PriorityStatus.UNKNOWN:
        raise RequestNotFoundError.of(request_id, client.queue.keys.queue)
    answers = {
        PriorityStatus.CHANGED: f"the request waits with priority {priority}",
        PriorityStatus.ACTIVE: "nothing changed: a worker holds the request",
        PriorityStatus.FINISHED: "nothing changed: the request has already ended",
    }
    write(answers[status])


@dead.command("list")
def list_dead(
    limit: Annotated[int, typer.Option(min=1, max=_ALL, help="How many, the latest first.")] = 100,
    as_json: AsJson = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """List dead letters, the latest first.

    Examples:

    promptq dead list
    promptq dead list --json | jq -r '.[].request_id'
    """
    with open_client(redis, queue) as client:
        letters = client.dead_letters(limit)
    if as_json:
        write(json.dumps([letter.model_dump() for letter in letters], indent=2))
        return
    from promptq.producer.commands.screens.render import dead_letters_table
    from promptq.producer.commands.screens.terminal import console_for_list

    if letters:
        console = console_for_list()
        console.print(dead_letters_table(letters, console.width))
    else:
        write("no dead letters")


@dead.command()
def show(
    request_id: RequestId, as_json: AsJson = False, redis: Redis = None, queue: Queue = None
) -> None:
    """Show a dead letter: its payload, and how each attempt ended.

    Examples:

    promptq dead show 0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10
    """
    with open_client(redis, queue) as client:
        letter = client.dead_letter(request_id)
    if as_json:
        write(letter.model_dump_json(indent=2))
        return
    from promptq.producer.commands.screens.render import clock_time, tokens

    write(f"{letter.request_id}, buried {clock_time(letter.buried_at)}")
    write(f"{letter.message}; it had emitted {tokens(letter.num_tokens)}")
    for attempt in letter.history:
        since, until = clock_time(attempt.claimed_at), clock_time(attempt.ended_at)
        write(f"  attempt {attempt.attempt} on {attempt.worker}, {since} to {until}: {attempt.how}")
    write(letter.payload)


@dead.command()
def requeue(
    request_ids: DeadIds = None,
    everything: All = False,
    as_json: AsJson = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Run dead letters again, each as a new request that shares its worker with no other request.

    Examples:

    promptq dead requeue 0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10
    promptq dead requeue --all
    """
    with open_client(redis, queue) as client:
        chosen = _chosen(client, request_ids, everything=everything)
        new_ids = {request_id: client.requeue(request_id) for request_id in chosen}
    if as_json:
        write(json.dumps({"requeued": new_ids}))
        return
    if not new_ids:
        write("no dead letters")
    for old, new in new_ids.items():
        write(f"{old} runs again as {new}")


@dead.command()
def purge(
    request_ids: DeadIds = None,
    everything: All = False,
    as_json: AsJson = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Delete dead letters and all data about them.

    Examples:

    promptq dead purge 0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10
    promptq dead purge --all
    """
    with open_client(redis, queue) as client:
        chosen = _chosen(client, request_ids, everything=everything)
        count = client.purge(chosen)
    if chosen and not count:
        raise RequestNotFoundError(f"{chosen[0]!r} is not a dead letter")
    write(json.dumps({"purged": count}) if as_json else f"purged {count} of {len(chosen)}")


def _chosen(client: Client, request_ids: list[str] | None, *, everything: bool) -> list[str]:
    if everything == bool(request_ids):
        raise typer.BadParameter("name the dead letters, or pass --all alone")
    return request_ids or client.dead_ids(_ALL)
