"""RQ as we use it: JSON and never pickle, one queue a kind of work, and lost jobs found soon.

Whoever can write to a Redis whose jobs are pickled can run code in its workers. RQ pickles by
default, and its cron always does, so both are told otherwise here, and nowhere else is a queue of
RQ's made.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import redis
from rq import Queue, Retry, Worker
from rq.cron import CronJob, CronScheduler
from rq.job import Job, JobStatus
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer
from rq.timeouts import JobTimeoutException

from promptq.producer.batches.batch_job import run_batch_job
from promptq.producer.clients.connecting import server_url
from promptq.producer.jobs import upkeep
from promptq.producer.settings import JobsSettings
from promptq.producer.webhooks.webhooks import BACKOFF_SECONDS, deliver_webhook
from promptq.shared.errors import ConfigurationError, PromptqError
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.connection import open_redis, without_password

_MONITOR_SECONDS = 5
_LOST_SECONDS = 15
_WORKER_TTL_SECONDS = 30
_RESULT_SECONDS = 600
_FAILED_SECONDS = 7 * 86_400
_BATCH_JOB = "promptq-"
_BATCHES = "-batches"
_TAKEN = {status.value.encode() for status in (JobStatus.QUEUED, JobStatus.STARTED)}


def open_jobs_redis(settings: JobsSettings) -> redis.Redis:
    """The server that RQ lives on. Raises ConfigurationError for a Sentinel's and a Cluster's."""
    url = settings.jobs_redis_url or server_url(settings.redis_url)
    if "+sentinel://" in url:
        raise _not_standalone(url, "is reached through Sentinel")
    connection = open_redis(url)
    if _is_of_a_cluster(connection):
        connection.close()
        raise _not_standalone(url, "is part of a Cluster")
    return connection


def _is_of_a_cluster(connection: redis.Redis) -> bool:
    client: Any = connection
    try:
        return bool(client.info("cluster").get("cluster_enabled"))
    except redis.exceptions.NoPermissionError:  # the role may not ask
        return False


def _not_standalone(url: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"jobs_redis_url (PROMPTQ_JOBS_REDIS_URL): RQ needs a standalone server, and"
        f" {without_password(url)} {why}; name another one, for RQ alone"
    )


def webhook_queue(queue: str, connection: redis.Redis) -> Queue:
    return _queue(f"promptq-{queue}-webhooks", connection)


def upkeep_queue(queue: str, connection: redis.Redis) -> Queue:
    """Apart from webhooks, whose receivers may keep all of their workers waiting."""
    return _queue(f"promptq-{queue}-upkeep", connection)


def batch_queue(queue: str, connection: redis.Redis) -> Queue:
    """Batch files, each of which may take hours."""
    return _queue(f"promptq-{queue}{_BATCHES}", connection)


def _queue(name: str, connection: redis.Redis) -> Queue:
    return Queue(name, connection=connection, serializer=JSONSerializer)


def batches_waiting(queue: Queue) -> set[str]:
    """Ids of batches that wait to be run."""
    return {job_id.removeprefix(_BATCH_JOB) for job_id in queue.get_job_ids()}


def is_taken(queue: Queue, batch_id: str) -> bool:
    """Whether RQ believes that a worker has a batch, one that does not wait.

    Of a worker that died RQ may believe so for hours, or for ever.
    """
    status = queue.connection.hget(Job.key_for(_BATCH_JOB + batch_id), "status")
    return status in _TAKEN


def enqueue_batch(queue: Queue, promptq_queue: str, batch_id: str) -> Job:
    """Have a batch run."""
    return queue.enqueue_call(
        run_batch_job,
        args=(promptq_queue, batch_id),
        job_id=_BATCH_JOB + batch_id,
        timeout=-1,
        result_ttl=_RESULT_SECONDS,
        failure_ttl=_FAILED_SECONDS,
    )


def enqueue_webhook(
    queue: Queue, promptq_queue: str, webhook_id: str, url: str, body: str, timeout: float
) -> Job:
    """Have a webhook called, again and again for a day."""
    return queue.enqueue_call(
        deliver_webhook,
        args=(promptq_queue, webhook_id, url, body),
        job_id=webhook_id,
        timeout=int(2 * timeout) + 10,  # even where each byte comes just in time
        retry=Retry(max=len(BACKOFF_SECONDS), interval=list(BACKOFF_SECONDS)),
        result_ttl=_RESULT_SECONDS,
        failure_ttl=_FAILED_SECONDS,
    )


def run_worker(queue: Queue, burst: bool = False) -> None:
    """Work until told to stop, or with `burst` until there is nothing to do.

    On one queue alone: of several RQ would take jobs in a way that may lose one.
    """
    worker = _Worker(
        [queue],
        connection=queue.connection,
        job_class=_Job,
        serializer=JSONSerializer,
        job_monitoring_interval=_MONITOR_SECONDS,
        maintenance_interval=_LOST_SECONDS,
        worker_ttl=_WORKER_TTL_SECONDS,
        log_job_description=False,
        exception_handlers=[_log_failure],
    )
    worker.work(burst=burst, logging_level="CRITICAL")  # what matters we log ourselves


def _log_failure(job: Job, kind: type[BaseException], error: BaseException, _: object) -> None:
    log = get_logger(job_id=job.id)
    if isinstance(error, PromptqError | JobTimeoutException):
        log.warning("job failed", reason=str(error), retries_left=job.retries_left)
    else:
        log.error("job failed", exc_info=error)


class JobScheduler:
    """Puts webhooks whose next attempt is due back into their queue.

    All bear one name, for the leader alone runs: the lock that RQ keeps by name would for a minute
    be that of a killed process.
    """

    def __init__(self, queue: Queue) -> None:
        self._scheduler: Any = RQScheduler(  # its methods are untyped
            [queue.name],
            connection=queue.connection,
            serializer=JSONSerializer,
            logging_level="WARNING",
            name=queue.name,
        )

    def run_once(self) -> None:
        """To be called once a second, by the leader."""
        if self._scheduler.acquire_locks():
            self._scheduler.enqueue_scheduled_jobs()

    def stop(self) -> None:
        self._scheduler.release_locks()


_FUNCTIONS: dict[str, Callable[..., object]] = {
    f"{function.__module__}.{function.__qualname__}": function
    for function in (run_batch_job, deliver_webhook, upkeep.reap, upkeep.sweep, upkeep.roll_up)
}


class _Job(Job):
    """RQ would import functions by whatever names stand in a job, from wherever these are."""

    success_callback = failure_callback = stopped_callback = None

    @property
    def func(self) -> Callable[..., object]:
        """One of ours. Raises ConfigurationError if the job names another."""
        try:
            return _FUNCTIONS[str(self.func_name)]
        except KeyError:
            raise ConfigurationError(
                f"{self.func_name} is none of this version's jobs: an earlier version left it, and"
                " only that runs it (docs/operations.md, Updates)"
            ) from None


class _Worker(Worker):
    def get_heartbeat_ttl(self, job: Job, *_: Any, **__: Any) -> int:
        """How soon a job counts as lost whose worker was killed; RQ would wait for 90 s."""
        return _MONITOR_SECONDS + _LOST_SECONDS

    def handle_warm_shutdown_request(self) -> None:
        """A batch is told to stop where it is; anything else is short and ends by itself."""
        if self.horse_pid and self.queues[0].name.endswith(_BATCHES):
            self.kill_horse(signal.SIGTERM)


class JsonCron(CronScheduler):
    """RQ's cron, whose jobs are JSON and run one at a time each."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(queue.connection, logging_level="WARNING")
        self._queue = queue

    def every(self, seconds: int, func: Callable[..., object], *args: str) -> None:
        """Run a function that often."""
        self._cron_jobs.append(_JsonCronJob(self._queue, func, args, seconds))


class _JsonCronJob(CronJob):
    def __init__(
        self, queue: Queue, func: Callable[..., object], args: tuple[str, ...], seconds: int
    ) -> None:
        super().__init__(queue.name, func=func, args=args, interval=seconds)
        self._queue = queue
        self._function = func

    def enqueue(self, connection: redis.Redis) -> Job:
        """The job; where the last one is not done yet, that one."""
        job_id = f"{self._queue.name}-{self._function.__name__}"
        last = self._queue.fetch_job(job_id)
        if last is not None and (last.is_queued or last.is_started):
            return last
        return self._queue.enqueue_call(
            self._function,
            args=self.args,
            job_id=job_id,
            timeout=60,
            result_ttl=_RESULT_SECONDS,
            failure_ttl=_RESULT_SECONDS,
        )
