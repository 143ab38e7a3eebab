"""Commands for batches of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from promptq.producer.commands.options import AsJson, Queue, Redis
from promptq.shared.runtime.extras import require

batch = typer.Typer(
    name="batch",
    no_args_is_help=True,
    help="Batches: files of requests in the format of OpenAI's Batch API.",
)


@batch.command()
def run(
    input_file: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="JSONL with one request in each line: custom_id, method, url, body.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="File for answers, as JSONL.")
    ],
    errors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for lines without an answer; default: OUTPUT with `.errors` in its name.",
        ),
    ] = None,
    in_flight: Annotated[
        int, typer.Option(min=1, help="Most lines that wait or run at once.")
    ] = 128,
    priority: Annotated[
        int,
        typer.Option(
            min=-1000, max=1000, help="Priority of lines that have none; lower runs sooner."
        ),
    ] = 0,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tenant of lines that name none.")
    ] = None,
    as_json: AsJson = False,
    redis: Redis = None,
    queue: Queue = None,
) -> None:
    """Run a file of requests and write the answers.

    If the run is interrupted, the same command continues it.
    Lines that are not requests go to the error file, and all other lines run.

    Examples:

    promptq batch run in.jsonl -o out.jsonl
    promptq batch run in.jsonl -o out.jsonl --in-flight 256 --priority 10
    """
    import sys

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from promptq.producer.batches.local_batch import errors_beside, run_batch
    from promptq.producer.batches.run_options import BatchProgress
    from promptq.producer.commands.screens.terminal import SafeConsole

    fields: dict[str, Any] = {"priority": priority}
    if tenant is not None:
        fields["tenant"] = tenant
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed, {task.fields[in_flight]} in flight"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=SafeConsole(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(input_file.name, total=None, failed=0, in_flight=0)

        def show(progress: BatchProgress) -> None:
            bar.update(
                task,
                total=progress.total,
                completed=progress.completed + progress.failed,
                failed=progress.failed,
                in_flight=progress.in_flight,
            )

        outcome = run_batch(
            input_file,
            output,
            error_file=errors,
            server=redis,
            queue=queue,
            max_in_flight=in_flight,
            fields=fields,
            on_progress=show,
        )
    done = outcome.progress
    if as_json:
        counts = {"total": done.total, "completed": done.completed, "failed": done.failed}
        print(json.dumps({"is_complete": outcome.is_complete, **counts}))
    elif outcome.is_complete:
        summary = f"{done.completed} of {done.total} lines answered in {output}"
        if done.failed:
            summary += f"; {done.failed} failed, see {errors or errors_beside(output)}"
        print(summary)
    else:
        print(
            f"stopped after {done.completed + done.failed} of {done.total} lines; the same"
            " command continues from here"
        )
    if not outcome.is_complete:
        raise typer.Exit(130)


def jobs(
    redis: Redis = None,
    queue: Queue = None,
    redis_wait: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait for the server to answer.")
    ] = None,
) -> None:
    """Run the background work of a queue: batch files, webhooks, upkeep.

    You can run several such processes. One of them leads, and all share the work.

    Examples:

    promptq jobs --redis redis://localhost:6379/0
    PROMPTQ_JOBS_REDIS_URL=redis://localhost:6380/0 promptq jobs
    """
    require("promptq jobs", "jobs")
    from promptq.producer.jobs.process import run_jobs
    from promptq.producer.settings.jobs import JobsSettings
    from promptq.shared.runtime.logs import configure_logs
    from promptq.shared.settings.common import read_settings_of
    from promptq.shared.settings.secrets import forget_secrets

    settings = read_settings_of(JobsSettings, redis_url=redis, queue=queue, redis_wait=redis_wait)
    forget_secrets()
    configure_logs(settings.log_level, settings.log_format)
    run_jobs(settings)
