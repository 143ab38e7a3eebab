"""The command `promptq worker`. The worker serves one model, or several models that take turns,
until somebody stops the worker."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal, get_args, get_origin

import click

from promptq.shared.errors import ConfigurationError
from promptq.shared.runtime.logs import configure_logs
from promptq.shared.server.advertised import advertised, how_to_find
from promptq.shared.server.connection import without_password
from promptq.shared.server.embedded import EmbeddedServer
from promptq.shared.settings.common import flag_of
from promptq.shared.settings.model_queues import queues_of_models
from promptq.shared.settings.secrets import forget_secrets
from promptq.shared.settings.worker import WorkerSettings, read_worker_settings
from promptq.worker.engine.checkpoints.location import is_gguf
from promptq.worker.serve.model_identity import NATIVE
from promptq.worker.serve.process import serve_until_stopped
from promptq.worker.swapping.taking_turns import take_turns

_ARGUMENTS = "engine_arguments"
"""The setting whose values follow `--` on the command line."""
_REPEATED = ("model", "queue")
"""The settings whose options may be repeated."""

HELP = """Serve a queue: claim requests, run them in one continuous batch, stream their tokens.

\b
Examples:
  promptq worker
  promptq worker --model ./my-model --redis redis://localhost:6379/0
  promptq worker --model Qwen/Qwen3-0.6B --dtype bfloat16 --max-num-seqs 32
  promptq worker --model model-free
  promptq worker --engine vllm --upstream http://localhost:8000
  promptq worker --engine vllm --model ./big -- --tensor-parallel-size 2
  promptq worker --model ./a --model ./b --queue a --queue b

Without options the worker serves the shipped model, on the server of the running `promptq up` or
on a server that it starts. `model-free` is not a model: it makes random letters, for load tests.

With several models, one of them is loaded: the one whose queue has work. The --swap options say
when another one takes its place.

SIGTERM or Ctrl-C drains: the worker claims no more and finishes the running requests. Those left
after the grace time go back to the queue with their progress. A second signal gives everything back
at once.
"""


def _place_compute_threads() -> None:
    """Set OpenMP's variables for compute threads, which torch reads when it is loaded. Variables
    that the user has set do not change.

    Compute threads sleep while they wait for each other, because other threads of this process need
    a core. Spinning cost a third of the tokens on two cores. If there are as many compute threads
    as cores, each thread is bound to one core. Threads that are not bound may share a core for tens
    of milliseconds. This sharing cost a tenth of the tokens.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ.setdefault("OMP_PLACES", "cores")
        os.environ.setdefault("OMP_PROC_BIND", "close")


def _leave_torch_out() -> None:
    """Prevent transformers from importing torch, which its tokenizers do not need.

    Torch would take 180 MB and half of the start-up time. Do not call this for a model with Python
    code or for GGUF files, because both need torch.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type] # None: "not to be imported"


def run(settings: Sequence[WorkerSettings]) -> None:
    """Run a worker with the settings of each model, until a signal ends the worker.

    If the settings name no Redis server and no `promptq up` runs, also runs a server. Raises
    PromptqError.
    """
    first = settings[0]
    if first.engine == NATIVE:
        _place_compute_threads()
    elif not (first.trust_remote_code or is_gguf(first.model or "")):
        _leave_torch_out()
    configure_logs(first.log_level, first.log_format)
    forget_secrets()  # before reading a model's files, or starting a server
    with ExitStack() as stack:
        redis_url = first.redis_url or advertised()
        if redis_url is None:
            redis_url = stack.enter_context(EmbeddedServer(is_advertised=True)).url
            where = f"{without_password(redis_url)} ({how_to_find(redis_url)})"
            print(f"no Redis given: started an embedded server at {where}", flush=True)
        if len(settings) > 1:
            asyncio.run(take_turns(settings, redis_url))
        else:
            serve_until_stopped(first, redis_url)


def command() -> click.Command:
    """Returns the command `promptq worker`, with one option for each setting."""

    def callback(model: Sequence[str], queue: Sequence[str], **others: Any) -> None:
        run(_settings_of_each(model, queue, others))

    options: list[click.Parameter] = []
    for key, field in WorkerSettings.model_fields.items():
        if key == _ARGUMENTS:
            continue
        is_flag = field.annotation is bool
        without_default = field.default is None or field.default is False
        default = "" if without_default else f" [default: {field.default}]"
        flag = flag_of(key)
        if field.default is True:
            flag, default = f"{flag}/--no-{flag.removeprefix('--')}", " [default: on]"
        options.append(
            click.Option(
                [flag, key],
                help=f"{field.description}{default}",
                is_flag=is_flag,
                multiple=key in _REPEATED,
                default=None,
                metavar=None if is_flag else _metavar(field.annotation),
            )
        )
    return _WorkerCommand(
        "worker",
        params=options,
        callback=callback,
        help=HELP,
        options_metavar="[OPTIONS] [-- ARGUMENTS]",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _settings_of_each(
    models: Sequence[str], queues: Sequence[str], others: dict[str, Any]
) -> list[WorkerSettings]:
    if len(models) < 2 and len(queues) < 2:
        model, queue = next(iter(models), None), next(iter(queues), None)
        return [read_worker_settings(model=model, queue=queue, **others)]
    shared = read_worker_settings(**others)
    if shared.served_model_name is not None:
        raise ConfigurationError(
            "--served-model-name: is for a worker of one model; `promptq models alias` gives each"
            " of several models an alias"
        )
    by_queue = queues_of_models(models, queues, shared.queue)
    return [
        read_worker_settings(model=name, queue=queue, **others) for queue, name in by_queue.items()
    ]


class _WorkerCommand(click.Command):
    """A command that passes only the words after `--` to the inference server."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:end])
        ctx.params[_ARGUMENTS] = tuple(args[end + 1 :]) or None  # None: use the environment's
        return rest


def _metavar(annotation: Any) -> str:
    """Returns the placeholder for a setting's value in the help: the possible words, or VALUE."""
    if annotation == bool | None:
        return "true|false"
    words = get_args(annotation) if get_origin(annotation) is Literal else ()
    return "|".join(words) or "VALUE"
