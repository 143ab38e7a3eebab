"""Any subscriber sees every event once and in order, whatever is lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest

from promptq import Client
from promptq.shared.errors import RequestNotFoundError, StreamChangedError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import FinishReason
from tests.producer.playing import KEYS, HandWorker
from tests.support.servers import Server

Read = Callable[..., Any]


Begun = tuple[str, Any, Any]


@pytest.fixture
def begun(client: Client, worker: Any, read: Read) -> Begun:
    """A request that is read and claimed: its id, its reader and its claim."""
    request_id = client.enqueue("Hi")
    return request_id, read(request_id), worker.take()


def wait_until_subscribed(worker: Any, request_id: str) -> None:
    while (
        dict(worker.redis.pubsub_numsub(KEYS.events(request_id)))[KEYS.events(request_id).encode()]
        == 0
    ):
        pass


def test_events_arrive_as_they_are_published(worker: Any, begun: Begun) -> None:
    """A subscriber that was there first gets each event when it is sent, and then the end."""
    _, reader, claim = begun
    worker.send(claim, "He")
    reader.wait_for("He")
    worker.send(claim, "l")
    reader.wait_for("Hel")
    worker.finish(claim, "lo")
    events = reader.finish()
    assert [event.index for event in events] == [0, 2, 3]
    assert [event.is_last for event in events] == [False, False, True]
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 5


def test_one_id_in_two_databases_is_two_streams(server: Server, read: Read) -> None:
    """A client enqueues, streams and finishes in one as if the other were not there."""
    with ExitStack() as stack:
        workers, readers = [], []
        for db in (0, 1):
            client = stack.enter_context(closing(server.connect("producer", db)))
            Client(client).enqueue("Hi", request_id="same")
            workers.append(HandWorker(stack.enter_context(closing(server.connect(db=db)))))
            readers.append(read("same", db=db))
        claims = [worker.take() for worker in workers]
        texts = ["", ""]
        for letters in (("a", "vw"), ("bc", "x"), ("d", "yz")):
            for n, text in enumerate(letters):
                workers[n].send(claims[n], text)
                texts[n] += text
                readers[n].wait_for(texts[n])
        for n in (1, 0):
            workers[n].finish(claims[n])
            assert "".join(event.text for event in readers[n].finish()) == texts[n]


def test_a_late_subscriber_gets_the_whole(client: Client, worker: Any, read: Read) -> None:
    """Events from before the subscription come from the log, later ones follow without a gap."""
    request_id = client.enqueue("Hi")
    claim = worker.take()
    worker.send(claim, "ab")
    worker.send(claim, "cd")
    reader = read(request_id)
    reader.wait_for("abcd")
    worker.finish(claim, "e")
    assert [event.index for event in reader.finish()] == [0, 2, 4]


def test_a_finished_stream_replays(client: Client, worker: Any, read: Read) -> None:
    """After the end the same events come again, byte for byte."""
    request_id = client.enqueue("Hi")
    claim = worker.take()
    worker.send(claim, "ab")
    worker.finish(claim, "c")
    first, second = read(request_id).finish(), read(request_id).finish()
    assert [event.to_json() for event in first] == [event.to_json() for event in second]
    assert [event.text for event in first] == ["ab", "c"]


def test_an_end_without_tokens(client: Client, worker: Any, read: Read) -> None:
    """A request cancelled while it waited has one event, the last."""
    request_id = client.enqueue("Hi")
    reader = read(request_id)
    wait_until_subscribed(worker, request_id)
    client.cancel(request_id)
    [event] = reader.finish()
    assert (event.index, event.text, event.finish_reason) == (0, "", FinishReason.CANCELLED)


def test_repeats_are_dropped(worker: Any, begun: Begun) -> None:
    """An event that the channel repeats is not delivered again."""
    request_id, reader, claim = begun
    event = worker.event(claim, "ab")
    worker._ends[request_id] = 0
    worker.send(claim, "ab")
    reader.wait_for("ab")
    worker.channel_only(request_id, event)
    worker.channel_only(request_id, event)
    worker.finish(claim, "c")
    assert [event.text for event in reader.finish()] == ["ab", "c"]


def test_a_jump_of_index_reads_the_log(worker: Any, begun: Begun) -> None:
    """A lost message is noticed at the next one and fetched, long before any silence."""
    _, reader, claim = begun
    worker.send(claim, "a")
    reader.wait_for("a")
    worker.log_only(claim, "b")
    worker.log_only(claim, "c")
    worker.send(claim, "d")
    reader.wait_for("abcd")
    worker.finish(claim, "e")
    assert [event.index for event in reader.finish()] == [0, 1, 2, 3, 4]


def test_a_lost_last_event_is_found_after_some_silence(
    client: Client, worker: Any, read: Read
) -> None:
    """Nothing follows a last event, so only the silence tells that it was lost."""
    request_id = client.enqueue("Hi")
    reader = read(request_id, silence_seconds=0.05)
    claim = worker.take()
    worker.send(claim, "a")
    reader.wait_for("a")
    worker.finish_unheard(claim, "b")
    assert reader.finish()[-1].finish_reason is FinishReason.STOP
    assert reader.text == "ab"


def test_an_event_that_only_the_channel_has(worker: Any, begun: Begun) -> None:
    """An event that continues the stream is delivered before its log is looked at."""
    request_id, reader, claim = begun
    wait_until_subscribed(worker, request_id)
    worker.send(claim, "a")
    reader.wait_for("a")
    worker.channel_only(request_id, TokenEvent(index=1, token_ids=[98], text="b"))
    reader.wait_for("ab")
    worker.send(claim, "b")
    worker.finish(claim, "c")
    assert [event.text for event in reader.finish()] == ["a", "b", "c"]


def test_what_is_no_event_is_passed_over(worker: Any, begun: Begun) -> None:
    """Anybody may publish on a channel; a stream does not break on it."""
    request_id, reader, claim = begun
    worker.send(claim, "a")
    reader.wait_for("a")
    worker.channel_only(request_id, "not JSON")
    worker.channel_only(request_id, '{"index": "x"}')
    worker.finish(claim, "b")
    assert [event.text for event in reader.finish()] == ["a", "b"]


def test_a_folded_log_gives_one_event(client: Client, worker: Any, read: Read) -> None:
    """After the log's time the record's result is the stream: one event with the whole."""
    request_id = client.enqueue("Hi")
    claim = worker.take()
    worker.send(claim, "ab")
    worker.finish(claim, "c")
    worker.fold_now(request_id)
    [event] = read(request_id).finish()
    assert (event.index, event.text, event.token_ids) == (0, "abc", [97, 98, 99])
    assert event.finish_reason is FinishReason.STOP
    assert event.attempt == 1
    assert event.usage is not None
    assert event.usage.prompt_tokens == 3


def test_a_log_folded_in_mid_stream_gives_the_rest(worker: Any, begun: Begun) -> None:
    """A client that reconnects after the log has expired gets the missing text, and no more."""
    request_id, reader, claim = begun
    worker.send(claim, "ab")
    reader.wait_for("ab")
    worker.finish_unheard(claim, "cde")
    worker.fold_now(request_id)
    worker.channel_only(request_id, "look again")
    first, rest = reader.finish()
    assert first.text == "ab"
    assert (rest.index, rest.text, rest.token_ids) == (2, "cde", [99, 100, 101])


def test_a_stream_from_the_middle(client: Client, worker: Any, read: Read) -> None:
    """The stream begins with the event that has the requested token, logged or still to come."""
    request_id = client.enqueue("Hi")
    claim = worker.take()
    worker.send(claim, "abc")
    worker.send(claim, "de")
    within, at_border, ahead = (read(request_id, from_index=index) for index in (1, 3, 6))
    within.wait_for("abcde")
    at_border.wait_for("de")
    wait_until_subscribed(worker, request_id)
    worker.send(claim, "fg")
    worker.finish(claim, "h")
    assert [event.text for event in within.finish()] == ["abc", "de", "fg", "h"]
    assert [event.text for event in at_border.finish()] == ["de", "fg", "h"]
    assert [event.text for event in ahead.finish()] == ["fg", "h"]


@pytest.mark.parametrize(("from_index", "index", "text"), [(1, 0, "abcd"), (4, 4, ""), (9, 4, "")])
def test_a_folded_log_from_the_middle(
    client: Client, worker: Any, read: Read, from_index: int, index: int, text: str
) -> None:
    """Where a token's text begins is lost with the log: all or, at the end, nothing comes."""
    request_id = client.enqueue("Hi")
    claim = worker.take()
    worker.send(claim, "abc")
    worker.finish(claim, "d")
    worker.fold_now(request_id)
    [event] = read(request_id, from_index=from_index).finish()
    assert (event.index, event.text, len(event.token_ids)) == (index, text, len(text))
    assert event.finish_reason is FinishReason.STOP


def test_an_unknown_id(read: Read, worker: Any) -> None:
    """There is nothing to wait for, and the error says which id and queue."""
    with pytest.raises(RequestNotFoundError, match=r"'nobody'.*queue 'default'"):
        read("nobody").finish()


def test_a_record_that_vanishes(client: Client, worker: Any, read: Read) -> None:
    """A flushed server ends the stream instead of leaving it to wait for ever."""
    request_id = client.enqueue("Hi")
    reader = read(request_id, silence_seconds=0.05)
    worker.send(worker.take(), "a")
    reader.wait_for("a")
    worker.redis.flushall()
    with pytest.raises(RequestNotFoundError):
        reader.finish()


@pytest.mark.parametrize("hash_type", ["none", "plain", "string"])
def test_a_request_that_plain_commands_enqueued(
    client: Client, worker: Any, read: Read, hash_type: str
) -> None:
    """The request is known as soon as it is pending. If its hash is no hash, its last event says
    so.
    """
    if hash_type == "plain":
        worker.redis.hset(KEYS.request("raw"), "payload", '{"prompt": "Hi"}')
    elif hash_type == "string":
        worker.redis.set(KEYS.request("raw"), "what is this")
    worker.redis.zadd(KEYS.pending, {"raw": 1})
    reader = read("raw")
    wait_until_subscribed(worker, "raw")
    if hash_type == "plain":
        worker.finish(worker.take(), "ok")
        assert reader.finish()[-1].text == "ok"
    else:
        with pytest.raises(ValueError, match="not enough values"):
            worker.take()
        [event] = reader.finish()
        assert event.error is not None
        assert event.error.type == "invalid_request"


def test_a_log_of_another_type(client: Client, worker: Any, read: Read) -> None:
    """Where the log should be is a stranger's key: the record still tells how the request ended."""
    request_id = client.enqueue("Hi")
    worker.redis.set(KEYS.tokens(request_id), "what is this")
    with pytest.raises(ValueError, match="not enough values"):
        worker.take()
    [event] = read(request_id).finish()
    assert event.finish_reason is FinishReason.ERROR


def test_sharded_events(client: Client, worker: Any, read: Read) -> None:
    """A queue whose config says so sends its events by sharded pub/sub."""
    worker.redis.hset(KEYS.config, "pubsub", "sharded")
    reader = read(client.enqueue("Hi"))
    claim = worker.take()
    worker.send(claim, "a")
    reader.wait_for("a")
    worker.send(claim, "b")
    reader.wait_for("ab")
    worker.finish(claim, "c")
    assert [event.index for event in reader.finish()] == [0, 1, 2]


def test_a_stream_goes_on_with_the_next_attempt(client: Client, worker: Any, read: Read) -> None:
    """A request that was given back continues at the next token, in the same stream."""
    request_id = client.enqueue("Hi")
    reader = read(request_id)
    first = worker.take()
    worker.send(first, "ab")
    reader.wait_for("ab")
    worker.redis.zadd(KEYS.leases, {request_id: 0})
    worker.queue.reap()
    second = worker.take()
    assert worker.send(first, "??").rows[0].is_lost
    worker._ends[request_id] = 2
    worker.finish(second, "c")
    events = reader.finish()
    assert [(event.text, event.attempt) for event in events] == [("ab", 1), ("c", 2)]


def test_other_tokens_in_the_place_of_lost_ones(worker: Any, begun: Begun) -> None:
    """A server that lost writes has the answer made anew: who read another beginning is told."""
    request_id, reader, claim = begun
    worker.send(claim, "ab")
    reader.wait_for("ab")
    worker.redis.delete(KEYS.tokens(request_id))
    worker._ends[request_id] = 0
    worker.channel_only(request_id, worker.event(claim, "ax"))
    with pytest.raises(StreamChangedError, match="from token 1 on"):
        reader.finish()
