"""Spoilt records fail alone, and the log has a bounded number of lines about them."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from promptq.producer.admin import api_keys, dead_letters, overview, queue_views, timeline
from promptq.producer.admin.queue_stats import stats
from promptq.shared.errors import RequestNotFoundError, SpoiltRecordError
from promptq.shared.protocol.events import Result, TokenEvent
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups, scripts, statistics
from promptq.shared.queue.call import Call, carry_out
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.spoilt import errors_logged, readable
from tests.support.requests import put
from tests.support.spoilt import SPOILT, TYPES, make_of_type, spoil_queue

WELL = WorkerStats(worker_id="well", model="m", max_num_seqs=4)


@pytest.mark.usefixtures("fresh_log")
def test_an_error_says_which_record_and_why(caplog: pytest.LogCaptureFixture) -> None:
    reading: Call[int] = Call("", ["HGET", "promptq:{q}:request:a", "told_at"], int)
    with pytest.raises(SpoiltRecordError, match=r"^promptq:{q}:request:a told_at: a spoilt record"):
        reading.read(b"\x1b[2Jx")
    with pytest.raises(ResponseError):
        reading.read(ResponseError("WRONGTYPE Operation"))
    assert caplog.messages == []
    guarded: Call[int] = Call("", reading.args, int, lambda: 7)
    assert guarded.read(b"1") == 1
    for reply in (b"\x1b[2J", None, ResponseError("WRONGTYPE Operation")):
        assert guarded.read(reply) == 7
    assert len(caplog.messages) == 3
    assert all("\x1b" not in message for message in caplog.messages)
    with pytest.raises(ResponseError, match="NOPERM"):
        guarded.read(ResponseError("NOPERM no"))


@pytest.mark.usefixtures("fresh_log")
def test_the_log_has_few_lines_of_many_records(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert readable("a list", ["1", "x", "2"], int) == [1, 2]
    assert len(caplog.messages) == 1
    for n in range(1000):
        assert readable(f"list {n}", ["x"], int) == []
    assert len(caplog.messages) == 10


@pytest.mark.usefixtures("fresh_log")
def test_a_record_fails_alone_and_the_server_for_all(caplog: pytest.LogCaptureFixture) -> None:
    done = []
    errors = (SpoiltRecordError("spoilt"), ResponseError("WRONGTYPE x"), RuntimeError("a bug"))
    for n, error in enumerate(errors):
        with errors_logged(f"record {n}"):
            raise error
        done.append(n)
    assert done == [0, 1, 2]
    assert [record.exc_info is not None for record in caplog.records] == [False, False, True]
    for error in (RedisConnectionError("away"), ResponseError("NOPERM"), OSError("away")):
        with pytest.raises(type(error)), errors_logged("record"):
            raise error


@pytest.mark.parametrize("kind", SPOILT)
def test_no_value_breaks_a_type_of_the_protocol(kind: str) -> None:
    """Each is refused as a value, or is written as JSON that can be read again."""
    value = SPOILT[kind]
    for model in (TokenEvent, Result):
        found = readable(kind, [value], model.model_validate_json)
        assert all(model.model_validate_json(it.to_json()) == it for it in found)
    assert OutputStyle.from_json(value) is None


@pytest.mark.parametrize("kind", SPOILT)
def test_whoever_looks_at_a_queue_sees_the_rest_of_it(
    client: Any, queue: RequestQueue, kind: str
) -> None:
    """Heartbeats, statistics, scaling, models, keys, dead letters: what is spoilt hides nothing."""
    spoil_queue(client, queue, SPOILT[kind])
    put(queue, "waits")

    def look(operation: Any) -> Any:
        return carry_out(operation, queue.run)

    queue.run(scripts.heartbeat(WELL, 60_000))
    queue.run(statistics.sample(statistics.Contribution(generated_tokens=3)))
    found = look(overview.overview(queue.keys))
    assert "well" in [worker.worker_id for worker in found.workers]
    assert found.waiting == 1
    found.model_dump_json()
    assert 5 in [sample.waiting for sample in queue.run(statistics.samples(queue.keys, 0))]
    assert look(overview.worker(queue.keys, "well")).slots == []
    assert [key.name for key in look(api_keys.api_keys(queue.keys))] == ["well"]
    assert "well" in [it.request_id for it in look(dead_letters.dead_letters(queue.keys))]
    assert look(timeline.timeline(queue.keys, "spoilt")).request_id == "spoilt"
    assert look(stats(queue.keys)).waiting == 1
    assert look(queue_views.queue_view(queue.keys)).num_waiting == 1
    look(queue_views.models(queue.keys))


def test_an_entry_of_the_future_does_not_end_the_statistics(
    client: Any, queue: RequestQueue
) -> None:
    """No later entry could follow it: of the stream, or of the hash that becomes an entry."""
    now = queue.run(lookups.server_time_ms())
    future, open_key = now + 10**10, queue.keys.prefix + "statistics:open"
    client.xadd(queue.keys.statistics, {"waiting": 7}, id=f"{future}-0")
    for bucket in (now - 6000, future, now - 5000):
        queue.run(statistics.sample(statistics.Contribution()))
        client.hset(open_key, mapping={"bucket": bucket, "waiting": 5, "workers": 0})
    queue.run(statistics.sample(statistics.Contribution()))
    samples = queue.run(statistics.samples(queue.keys, 0))
    assert [(each.at, each.waiting) for each in samples] == [(now - 6000, 5), (now - 5000, 5)]


@pytest.mark.parametrize("kind", TYPES)
def test_a_worker_writes_its_own_keys_anew(client: Any, queue: RequestQueue, kind: str) -> None:
    keys = queue.keys
    own = {keys.worker("well"): "hash", keys.slots("well"): "hash", keys.workers: "zset"}
    own |= {keys.statistics: "stream", keys.prefix + "statistics:open": "hash"}
    for key in own:
        make_of_type(client, key, kind)
    queue.run(scripts.heartbeat(WELL, 60_000, []))
    queue.run(statistics.sample(statistics.Contribution(generated_tokens=3)))
    assert "well" in queue.run(lookups.live_worker_ids(keys, 0))
    assert queue.run(lookups.worker_stats(keys, "well")) is not None
    assert carry_out(overview.worker(keys, "well"), queue.run).stats.max_num_seqs == 4
    assert client.type(keys.prefix + "statistics:open") == b"hash"


def test_a_record_of_another_type_is_none(client: Any, queue: RequestQueue) -> None:
    for kind in TYPES[:4]:
        make_of_type(client, queue.keys.request("a"), kind)
        assert queue.state("a") is None
        with pytest.raises(RequestNotFoundError):
            carry_out(timeline.timeline(queue.keys, "a"), queue.run)
