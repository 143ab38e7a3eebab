"""RQ as we use it: only our jobs, one queue for each kind of work, and lost jobs are found soon.

RQ imports what a job names (its function, its callbacks, the class of its instance). It sends HTTP
requests that a job's hash asks for, starts jobs that depend on others, and obeys commands on its
channel. None of that is used here, and each way to it is closed. `allowed_jobs` says what may run.
Jobs are JSON, never pickled. RQ's queues and workers are made in this module only.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import signal
from collections.abc import Callable
from typing import Any

import redis
from rq import Queue, Worker
from rq.cron import CronJob, CronScheduler
from rq.exceptions import NoSuchJobError
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.timeouts import JobTimeoutException
from rq.utils import now
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY, register

from promptq.producer.batch_store.input_file import is_batch_id
from promptq.producer.clients.connecting import server_url
from promptq.producer.jobs.allowed_jobs import (
    BATCH_JOB,
    BATCHES,
    MAX_DATA_BYTES,
    UPKEEP,
    AllowedJob,
    JobCall,
    RefusedJobError,
    read_call,
    rq_queue_name,
    unpacked,
)
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.errors import ConfigurationError, PromptqError
from promptq.shared.queue.call import ids_of
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.connection import open_redis, without_password

MakeQueue = Callable[[str, redis.Redis], Queue]

_MONITOR_SECONDS = 5
_LOST_SECONDS = 15
_WORKER_TTL_SECONDS = 30
_BATCH_JOB = "promptq-"
_TAKEN = {status.value.encode() for status in (JobStatus.QUEUED, JobStatus.STARTED)}
_JOB_ID = re.compile(rb"promptq-[A-Za-z0-9_-]{1,192}")
_EXECUTION = re.compile(_JOB_ID.pattern + rb":[A-Za-z0-9_-]{1,200}")
_WORKER_KEY = re.compile(rb"rq:worker:promptq-[0-9a-f]{32}")
_FIELDS = ("data", "origin", "status")
"""The fields of a job's hash that are read."""
_REFUSED_SECONDS = 60
_SHOWN_BYTES = 100


def open_jobs_redis(settings: JobsSettings) -> redis.Redis:
    """Connect to RQ's server. Raises ConfigurationError for one behind Sentinel or in a Cluster."""
    url = settings.jobs_redis_url or server_url(settings.redis_url)
    if "+sentinel://" in url:
        raise _not_standalone(url, "is reached through Sentinel")
    if "+cluster://" in url:
        raise _not_standalone(url, "is a Cluster")
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


def upkeep_queue(queue: str, connection: redis.Redis) -> Queue:
    """The queue for upkeep. It is separate, as batches may keep all their workers for hours."""
    return _queue(rq_queue_name(queue, UPKEEP), connection)


def batch_queue(queue: str, connection: redis.Redis) -> Queue:
    """The queue for batch files, each of which may take hours."""
    return _queue(rq_queue_name(queue, BATCHES), connection)


def _queue(name: str, connection: redis.Redis) -> Queue:
    return _Queue(name, connection=connection, job_class=_Job, serializer=JSONSerializer)


def batches_waiting(queue: Queue) -> set[str]:
    """Ids of batches that wait for one of RQ's workers."""
    client: Any = queue.connection
    ids = (job_id.removeprefix(_BATCH_JOB) for job_id in ids_of(client.lrange(queue.key, 0, -1)))
    return {batch_id for batch_id in ids if is_batch_id(batch_id)}


def num_workers(queue: Queue) -> int:
    """How many workers are alive for RQ. A killed one still counts for some seconds."""
    return len(_worker_keys(queue))


def _worker_keys(queue: Queue) -> list[bytes]:
    """The keys of our own workers. Other entries of RQ's list are ignored."""
    client: Any = queue.connection
    listed = client.smembers(WORKERS_BY_QUEUE_KEY % queue.name)
    return [it for it in listed if _WORKER_KEY.fullmatch(it)]


def is_taken(queue: Queue, batch_id: str) -> bool:
    """Whether a worker has a batch that does not wait, as far as RQ knows.

    If that worker has died, RQ may not know it for hours, or ever.
    """
    status = queue.connection.hget(Job.key_for(_BATCH_JOB + batch_id), "status")
    return status in _TAKEN


def enqueue_batch(queue: Queue, promptq_queue: str, batch_id: str) -> Job:
    """Let RQ run a batch."""
    return _enqueue(queue, BATCH_JOB, _BATCH_JOB + batch_id, promptq_queue, batch_id)


def _enqueue(queue: Queue, job: AllowedJob, job_id: str, *args: str) -> Job:
    return queue.enqueue_call(
        job.function,
        args=args,
        job_id=job_id,
        timeout=job.timeout,
        result_ttl=job.result_seconds,
        failure_ttl=job.failure_seconds,
    )


def _id_of(queue: Queue, job: AllowedJob) -> str:
    """The fixed id of an upkeep job. RQ's ids have no dots, but names of queues may."""
    name = queue.name
    if "." in name:
        name = f"promptq-{hashlib.sha256(name.encode()).hexdigest()}"
    return f"{name}-{job.function.__name__}"


def run_worker(queue: Queue, settings: JobsSettings, burst: bool = False) -> None:
    """Work until told to stop, or with `burst` until there is nothing to do.

    A worker has one queue: from several, RQ would take jobs in a way that may lose one.
    """
    worker = _Worker(
        [queue],
        name=f"promptq-{secrets.token_hex(16)}",  # the role `jobs` may reach such names only
        connection=queue.connection,
        job_class=_Job,
        queue_class=_Queue,
        serializer=JSONSerializer,
        job_monitoring_interval=_MONITOR_SECONDS,
        maintenance_interval=_LOST_SECONDS,
        worker_ttl=_WORKER_TTL_SECONDS,
        log_job_description=False,
        exception_handlers=[_log_failure],
    )
    worker.settings = settings
    worker.work(burst=burst, logging_level="CRITICAL")  # what matters we log ourselves


def _log_failure(job: Job, kind: type[BaseException], error: BaseException, _: object) -> None:
    log = get_logger(job_id=job.id)
    if isinstance(error, PromptqError | JobTimeoutException):
        log.warning("job failed", reason=str(error))
    else:
        log.error("job failed", exc_info=error)


class _Job(Job):
    """A job of which only the data, the name of its queue and its status are read.

    All else that RQ keeps in a job's hash is ignored: callbacks and webhooks, jobs that depend on
    it, groups, retries, repeats, rates, its result.
    """

    def _fetch_status(self) -> JobStatus:
        client: Any = self.connection
        return _status_of(client.hget(self.key, "status"))

    _call: JobCall | RefusedJobError = RefusedJobError("it has no data")
    taken_from = ""
    """The queue of RQ from which a worker took it."""
    settings: JobsSettings
    """Those of the worker that took it."""

    @classmethod
    def fetch(cls, id: str, connection: Any = None, serializer: Any = None) -> Job:
        """As RQ's; raises NoSuchJobError for ids that are not ours, too."""
        if not _JOB_ID.fullmatch(id.encode("utf-8", "replace")):
            raise NoSuchJobError("not the id of a job")
        return super().fetch(id, connection=connection, serializer=serializer)

    def refresh(self) -> None:
        """Read the job again. Raises NoSuchJobError if there is none."""
        client: Any = self.connection
        pipeline = client.pipeline(transaction=False)
        for name in _FIELDS:
            pipeline.hstrlen(self.key, name)
        sizes = pipeline.execute(raise_on_error=False)
        if any(isinstance(size, Exception) for size in sizes) or not sizes[0]:
            raise NoSuchJobError(f"No such job: {self.key}")
        small = [it for it, size in zip(_FIELDS, sizes, strict=True) if size <= MAX_DATA_BYTES]
        values = client.hmget(self.key, small) if small else []
        self.restore({name.encode(): it for name, it in zip(small, values, strict=True) if it})

    def restore(self, raw_data: Any) -> None:
        """Take over the fields of RQ's hash that are read."""
        self.data = raw_data.get(b"data", b"")
        self.origin = raw_data.get(b"origin", b"").decode("ascii", "replace")
        self._status = _status_of(raw_data.get(b"status"))
        self._instance, self._args, self._kwargs = None, (), {}
        try:
            self._call = read_call(unpacked(self.data))
        except RefusedJobError as error:
            self._call, self._func_name = error, "refused"
            self.timeout = _REFUSED_SECONDS
            self.failure_ttl = BATCH_JOB.failure_seconds
        else:
            job = self._call.job
            self._func_name, self.timeout = job.name, job.timeout
            self.result_ttl, self.failure_ttl = job.result_seconds, job.failure_seconds
            self._args = tuple(self._call.arguments.model_dump().values())

    def _execute(self) -> str:
        """Run the job. Raises RefusedJobError for others than ours, before it imports anything."""
        if isinstance(self._call, RefusedJobError):
            raise self._call
        return self._call.bind(self.taken_from, self.settings)()

    @property
    def func(self) -> Any:
        """RQ would import the function by its name."""
        raise RefusedJobError("no job's function is looked up by its name")


def _status_of(raw: bytes | None) -> JobStatus:
    return next((it for it in JobStatus if it.value.encode() == raw), JobStatus.CREATED)


class _Queue(Queue):
    """Takes only ids of our jobs from RQ's list, and starts no jobs that depend on others."""

    @classmethod
    def lmove(cls, connection: redis.Redis, queue_key: str, timeout: int | None) -> Any:
        while True:
            taken = super().lmove(connection, queue_key, timeout)
            if taken is None or _JOB_ID.fullmatch(taken[1]):
                return taken
            intermediate = cls.from_queue_key(queue_key, connection=connection).intermediate_queue
            connection.lrem(intermediate.key, 0, taken[1])
            get_logger().warning("job entry removed", job_id=repr(taken[1][:_SHOWN_BYTES]))

    def move_dependents_to_ready(self, *_: Any, **__: Any) -> dict[str, list[str]]:
        """None of our jobs waits for another."""
        return {}

    def enqueue_dependents(self, *_: Any, **__: Any) -> dict[str, list[str]]:
        return {}


class _StartedJobs(StartedJobRegistry):
    def get_queue(self) -> Queue:
        return _queue(self.name, self.connection)


class _Worker(Worker):
    settings: JobsSettings

    def _set_connection(self, connection: redis.Redis) -> redis.Redis:
        """Drop connections that are open already. RQ sets its longer timeout only for new ones, and
        an idle worker whose wait for a job fails pauses, each time twice as long."""
        connection = super()._set_connection(connection)
        connection.connection_pool.disconnect()
        connection.connection_pool.reset()
        return connection

    def execute_job(self, job: Job, queue: Queue) -> None:
        job.origin = queue.name  # not what its hash says
        if isinstance(job, _Job):
            job.taken_from, job.settings = queue.name, self.settings
        super().execute_job(job, queue)

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Send a heartbeat, and register again in case the server has lost the worker."""
        super().heartbeat(timeout, pipeline)
        if pipeline is None:
            register(self)

    def subscribe(self) -> None:
        """Do nothing. Commands on RQ's channel could end a worker or kill its job."""

    def get_heartbeat_ttl(self, job: Job, *_: Any, **__: Any) -> int:
        """Seconds after which a killed worker's job counts as lost. RQ would wait for 90 s."""
        return _MONITOR_SECONDS + _LOST_SECONDS

    def handle_warm_shutdown_request(self) -> None:
        """Tell a batch to stop where it is. Other jobs are short and end by themselves."""
        if self.horse_pid and self.queues[0].name.endswith(f"-{BATCHES}"):
            self.kill_horse(signal.SIGTERM)

    def maintain_heartbeats(self, job: Job, execution: Execution) -> None:
        """Send heartbeats, and tell a batch again to stop if this worker was told to.

        The first signal is lost if it comes while the batch's process is being made.
        """
        if self._stop_requested:
            self.handle_warm_shutdown_request()
        super().maintain_heartbeats(job, execution)

    def clean_registries(self) -> None:
        """Clean the lists with our jobs: jobs of killed workers fail, and old ones are deleted."""
        [queue] = self.queues
        if queue.acquire_maintenance_lock():
            try:
                self._clean(queue)
            except (redis.ResponseError, ValueError) as error:
                get_logger().warning("a list of RQ has a wrong entry or type", reason=str(error))
            finally:
                queue.release_maintenance_lock()  # type: ignore[no-untyped-call] # RQ has no types for it
        self.last_cleaned_at = now()  # type: ignore[assignment] # RQ's own type is None

    def _clean(self, queue: Queue) -> None:
        client: Any = self.connection
        started = _StartedJobs(queue=queue)
        strange = [it for it in client.zrange(started.key, 0, -1) if not _EXECUTION.fullmatch(it)]
        if strange:
            client.zrem(started.key, *strange)
        started.cleanup(exception_handlers=self._exc_handlers)
        queue.finished_job_registry.cleanup()
        queue.failed_job_registry.cleanup()
        for key in _worker_keys(queue):
            if not client.exists(key):
                client.srem(WORKERS_BY_QUEUE_KEY % queue.name, key)
                client.srem(REDIS_WORKER_KEYS, key)
        waiting = queue.intermediate_queue
        for job_id in set(client.lrange(waiting.key, 0, -1)):
            if not _JOB_ID.fullmatch(job_id):
                client.lrem(waiting.key, 0, job_id)
        waiting.cleanup(self, queue)

    def clean_group_registries(self) -> None:
        """Do nothing: we have no groups."""


class JsonCron(CronScheduler):
    """RQ's cron with jobs in JSON. Each job runs at most once at a time."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(queue.connection, logging_level="WARNING")
        self._queue = queue

    def every(self, seconds: int, job: AllowedJob, promptq_queue: str) -> None:
        """Run a job every so many seconds."""
        self._cron_jobs.append(_JsonCronJob(self._queue, job, promptq_queue, seconds))


class _JsonCronJob(CronJob):
    def __init__(self, queue: Queue, job: AllowedJob, promptq_queue: str, seconds: int) -> None:
        super().__init__(queue.name, func=job.function, args=(promptq_queue,), interval=seconds)
        self._queue = queue
        self._job = job
        self._promptq_queue = promptq_queue

    def enqueue(self, connection: redis.Redis) -> Job:
        """Enqueue the job, unless its last run is not done yet. Gives the job."""
        job_id = _id_of(self._queue, self._job)
        last = self._queue.fetch_job(job_id)
        if last is not None and (last.is_queued or last.is_started):
            return last
        return _enqueue(self._queue, self._job, job_id, self._promptq_queue)
