"""The `promptq` command."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import SecretStr

from producer.batch_commands import batch, jobs
from producer.gateway.command import gateway
from producer.key_commands import keys
from producer.options import AsJson, DataDir, Queue, Redis, RequestId
from producer.options import open_client as _client
from producer.printing import StreamPrinter
from producer.queue_commands import dead, drain, pause, reprioritise, resume
from producer.top import top
from shared.connection import without_password
from shared.errors import InvalidRequestError, PromptqError, RequestNotFoundError
from shared.request_queue import new_request_id
from shared.scripts import CancelStatus
from shared.settings import ENV_PREFIX, Settings, flag_of, read_settings

app = typer.Typer(
    name="promptq",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            print(version("promptq"))
        except PackageNotFoundError:
            print("not installed as a package")
        raise typer.Exit


@app.callback()
def promptq(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """A message-queue worker service for language models: Redis is its API.

    Start all of it in one terminal, use it in another:

      promptq up
      promptq submit "Once upon a time"
    """


@app.command(context_settings=PASS_THROUGH)
def up(
    context: typer.Context,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Use this server, and start none; default: PROMPTQ_REDIS_URL.",
            show_default=False,
        ),
    ] = None,
    redis_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port of the embedded server; default: 6399, or a free one if that is taken.",
            show_default=False,
        ),
    ] = None,
    data: DataDir = None,
    workers: Annotated[int, typer.Option(min=0, help="Worker processes.")] = 1,
    queue: Queue = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve HTTP on this port too, with gateway and jobs.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a server and workers in this terminal, with --port a gateway, until Ctrl-C.

    Without a Redis URL it starts an embedded server, which other promptq
    commands of this user find by themselves. Workers that die are started again.
    All other options go to the workers; `promptq worker --help` lists them.

    Examples:

      promptq up
      promptq up --port 8000
      promptq up --model Qwen/Qwen3-0.6B --dtype bfloat16 --workers 2
      promptq up --redis redis://localhost:6379/0
      promptq up --data ./promptq-data
    """
    from rich.console import Console

    from producer.up import UpOptions, run_up

    settings = read_settings()
    options = UpOptions(
        redis_url=redis or settings.redis_url,
        redis_port=redis_port,
        data_dir=data,
        queue=queue or settings.queue,
        num_workers=workers,
        http_port=port,
        worker_args=context.args,
    )
    run_up(options, Console())


@app.command(context_settings={**PASS_THROUGH, "help_option_names": []})
def worker(context: typer.Context) -> None:
    """Run one worker; `promptq worker --help` lists its options.

    Examples:

      promptq worker --model Qwen/Qwen3-0.6B --redis redis://localhost:6379/0
      promptq worker --model ./my-model --queue chat --max-num-seqs 32
    """
    from producer.processes import worker_command

    command = worker_command(context.args)
    os.execv(command[0], command)


@app.command()
def server(
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port to listen on; default: 6399, or a free one if that is taken.",
            show_default=False,
        ),
    ] = None,
    data: DataDir = None,
) -> None:
    """Run the embedded server alone, until Ctrl-C.

    Examples:

      promptq server
      promptq server --port 6399 --data ./promptq-data
    """
    from rich.console import Console

    from producer.up import run_server

    run_server(port, data, Console())


@app.command()
def submit(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; without it, or as -, standard input.", show_default=False),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of output.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens of so much.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep so many of the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be given several times."),
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="-1000 to 1000, lower runs sooner; default 0.")
    ] = None,
    deadline_ms: Annotated[
        int | None, typer.Option(help="End the request if it is not done after so long.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a chat message: use the chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message of the chat; implies --chat.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=JSON", help="Any other field of a request."),
    ] = None,
    request_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Id of the request; default: a new one."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the id and leave; see `promptq watch`.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as JSON.")] = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Enqueue a request and print its text as it comes. Ctrl-C cancels it.

    Examples:

      promptq submit "Once upon a time" --max-tokens 64
      promptq submit --chat "Tell me a story about a fox." --temperature 0.7
      promptq submit --detach --priority -5 < prompt.txt
      promptq submit "Once" --json --param logprobs=2 --param 'stop_token_ids=[0]'
    """
    fields = _parse_params(param or [])
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or None,
        "priority": priority,
        "deadline_ms": deadline_ms,
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    if "prompt" not in fields and "messages" not in fields:
        fields |= _prompt_fields(prompt, chat, system)
    with _client(redis, queue) as client:
        request_id = request_id or new_request_id()
        try:
            request_id = client.enqueue(request_id=request_id, **fields)
        except KeyboardInterrupt:
            client.cancel(request_id)
            raise
        if detach:
            print(json.dumps({"id": request_id}) if as_json else request_id)
            return
        raise typer.Exit(StreamPrinter(client, request_id, as_json).submit())


@app.command()
def watch(
    request_id: RequestId,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as JSON.")] = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Print a request's text from the beginning, then as it comes.

    Examples:

      promptq watch $(promptq submit --detach "Once upon a time")
      promptq watch 0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10 --json
    """
    with _client(redis, queue) as client:
        raise typer.Exit(StreamPrinter(client, request_id, as_json).watch())


@app.command()
def cancel(request_id: RequestId, redis: Redis = None, queue: Queue = None) -> None:
    """End a request: at once if it waits, at the next token if it runs.

    Examples:

      promptq cancel 0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10
    """
    with _client(redis, queue) as client:
        status = client.cancel(request_id)
    if status is CancelStatus.UNKNOWN:
        raise RequestNotFoundError(f"id: no request {request_id!r} is known")
    print(
        {
            CancelStatus.CANCELLED: "cancelled",
            CancelStatus.FLAGGED: "cancelled; its worker ends it now",
            CancelStatus.FINISHED: "it was over before",
        }[status]
    )


@app.command()
def stats(as_json: AsJson = False, redis: Redis = None, queue: Queue = None) -> None:
    """Show what the queue holds and how its workers fare.

    Examples:

      promptq stats
      promptq stats --json | jq .waiting
    """
    with _client(redis, queue) as client:
        found = client.stats()
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    from rich.console import Console

    from producer.render import queue_table, workers_table

    console = Console()
    console.print(queue_table(found))
    if found.workers:
        console.print(workers_table(found.workers))
    else:
        console.print("No worker is alive: start one with [bold]promptq worker[/].")


@app.command(context_settings=PASS_THROUGH)
def demo(context: typer.Context) -> None:
    """See it work: a server, a worker and a dozen requests, side by side.

    It needs nothing else and leaves nothing behind. Options go to the worker.

    Examples:

      promptq demo
      promptq demo --model Qwen/Qwen3-0.6B
    """
    from producer.demo import run_demo

    raise typer.Exit(run_demo(context.args))


@app.command()
def settings(as_json: AsJson = False) -> None:
    """List the settings, each an environment variable.

    Those of workers are options of `promptq worker` too. Those that begin with
    PROMPTQ_HTTP_ are the gateway's, those of batches and webhooks the jobs'.

    Examples:

      promptq settings
      PROMPTQ_MAX_NUM_SEQS=8 promptq settings --json
    """
    from producer.gateway.settings import read_gateway_settings
    from producer.jobs.settings import read_jobs_settings

    rows = _settings_rows(read_gateway_settings(), read_jobs_settings())
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console

    from producer.render import settings_table

    Console().print(settings_table(rows))


for _command in (gateway, jobs, top, pause, resume, drain, reprioritise):
    app.command()(_command)
app.add_typer(dead, name="dead")
app.add_typer(keys, name="keys")
app.add_typer(batch, name="batch")


def _settings_rows(*current: Settings) -> list[dict[str, Any]]:
    """A row for each setting; those that several have are listed once."""
    rows: dict[str, dict[str, Any]] = {}
    for settings in current:
        for name, field in type(settings).model_fields.items():
            value = getattr(settings, name)
            if name.endswith("redis_url") and value is not None:
                value = without_password(value)
            rows[name] = {
                "variable": ENV_PREFIX + name.upper(),
                "option": flag_of(name) if name in Settings.model_fields else None,
                "default": _shown(field.get_default(call_default_factory=True)),
                "value": _shown(value),
                "description": field.description,
            }
    return list(rows.values())


def _shown(value: Any) -> Any:
    """JSON has neither paths nor secrets; of a secret there are only asterisks."""
    return str(value) if isinstance(value, (Path, SecretStr)) else value


def _prompt_fields(prompt: str | None, chat: bool, system: str | None) -> dict[str, Any]:
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            print("Type the prompt; Ctrl-D ends it.", file=sys.stderr)
        prompt = sys.stdin.read().rstrip("\n")
    if not chat and system is None:
        return {"prompt": prompt}
    messages = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*messages, {"role": "user", "content": prompt}]}


def _parse_params(params: list[str]) -> dict[str, Any]:
    fields = {}
    for param in params:
        name, equals, text = param.partition("=")
        if not equals:
            raise InvalidRequestError(f"--param: {param!r} is not FIELD=JSON", field=name)
        try:
            fields[name] = json.loads(text)
        except ValueError:
            raise InvalidRequestError(
                f"{name}: {text!r} is not JSON; a text needs its quotes: '{name}=\"...\"'",
                field=name,
            ) from None
    return fields


def main() -> NoReturn:
    """The console command: whatever is wrong is said in one sentence, with exit code 1."""
    try:
        app(prog_name="promptq")
    except PromptqError as error:
        print(f"promptq: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
