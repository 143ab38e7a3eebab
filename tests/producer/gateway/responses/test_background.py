"""Responses that go on without their client, which comes back for the rest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from tests.producer.gateway.living import LiveGateway
from tests.producer.gateway.played import in_background, is_cancelled, openai_of, response_of
from tests.producer.playing import HandWorker
from tests.support.waiting import until


def test_a_response_in_the_background(gateway: LiveGateway, own_worker: HandWorker) -> None:
    with openai_of(gateway) as client:
        made = client.responses.create(model="", input="Go", background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        assert client.responses.retrieve(made.id).status == "queued"
        claim = own_worker.take()
        own_worker.send(claim, "Hi")
        assert client.responses.retrieve(made.id).status == "in_progress"
        own_worker.finish(claim, "!")
        over = client.responses.retrieve(made.id)
        assert (over.status, over.output_text) == ("completed", "Hi!")


def test_a_client_that_leaves_goes_on_where_it_was(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    """At any place, also within an event; what it reads twice is the same."""
    with openai_of(gateway) as client:
        stream = client.responses.create(model="", input="Go", background=True, stream=True)
        first = [next(stream), next(stream)]
        assert [it.type for it in first] == ["response.created", "response.queued"]
        assert first[0].type == "response.created"
        response_id = first[0].response.id
        claim = own_worker.take()
        own_worker.send(claim, "Once")
        while first[-1].type != "response.output_text.delta":
            first.append(next(stream))
        stream.close()
        own_worker.send(claim, " upon")
        assert not is_cancelled(own_worker, response_id)
        last_number = first[-1].sequence_number
        again = client.responses.retrieve(response_id, stream=True, starting_after=last_number)
        second: list[Any] = [next(again)]
        assert second[0].delta == " upon"
        own_worker.finish(claim, " a time")
        second += [*again]
        whole = list(client.responses.retrieve(response_id, stream=True))
        assert whole == [*first, *second]
        numbers = [it.sequence_number for it in whole]
        assert numbers == sorted(set(numbers))
        text, begin = "Once upon a time", last_number - 3
        for after in range(numbers[-1] + 1):
            rest: Any = list(
                client.responses.retrieve(response_id, stream=True, starting_after=after)
            )
            assert [it.sequence_number for it in rest] == [it for it in numbers if it > after]
            deltas = [it.delta for it in rest if it.type == "response.output_text.delta"]
            num_read = min(max(after + 1 - begin, 0), len(text))
            assert "".join(deltas) == text[num_read:]


def test_a_log_that_was_folded_gives_the_same_places(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    """Where no gateway saw the end in time, its pieces are gone, and its numbers are not."""
    with openai_of(gateway) as client:
        with in_background(client, own_worker) as (response_id, claim):
            own_worker.send(claim, "Once")
            stream: Any = client.responses.retrieve(response_id, stream=True)
            read: list[Any] = [next(stream)]
            while read[-1].type != "response.output_text.delta":
                read.append(next(stream))
            stream.close()
            own_worker.finish(claim, " more")
            own_worker.fold_now(response_id)
        after = read[-1].sequence_number
        rest: list[Any] = [
            *client.responses.retrieve(response_id, stream=True, starting_after=after)
        ]
    assert rest[0].delta == " more"
    assert rest[0].sequence_number == after + len(" more")
    assert rest[-1].response.output_text == "Once more"


def test_cancel(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """While it waits, while it runs, and after its end, when it changes nothing."""
    with openai_of(gateway) as client:
        waiting = client.responses.create(model="", input="Go", background=True)
        assert client.responses.cancel(waiting.id).status == "cancelled"
        assert client.responses.retrieve(waiting.id).status == "cancelled"
        with in_background(client, own_worker) as (response_id, claim):
            own_worker.send(claim, "Half")
            assert client.responses.cancel(response_id).status == "cancelled"
            own_worker.send(claim, " more")  # which ends it, as it was cancelled
            over = client.responses.retrieve(response_id)
            assert (over.status, over.output_text) == ("cancelled", "Half")
            *_, last = client.responses.retrieve(response_id, stream=True)
            assert last.type == "response.incomplete"
            assert last.response == over
        with in_background(client, own_worker) as (response_id, claim):
            own_worker.finish(claim, "All")
            assert client.responses.cancel(response_id).status == "completed"
        other, _ = response_of(client, own_worker, input="Go")
        with pytest.raises(openai.BadRequestError, match="background: true"):
            client.responses.cancel(other.id)


def test_delete_cancels(gateway: LiveGateway, own_worker: HandWorker) -> None:
    with openai_of(gateway) as client, in_background(client, own_worker) as (response_id, _):
        client.responses.delete(response_id)
        assert is_cancelled(own_worker, response_id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)


def test_a_client_in_the_foreground_that_leaves(
    gateway: LiveGateway, own_worker: HandWorker, http: httpx2.Client
) -> None:
    """Leaving cancels the response, as with chats. A client that only reads it again cancels
    nothing.
    """
    with http.stream(
        "POST", "/v1/responses", json={"input": "Go", "background": True, "stream": True}
    ) as made:
        response_id = made.headers["X-Request-Id"]
        claim = own_worker.take()
        own_worker.send(claim, "a")
    with http.stream("GET", f"/v1/responses/{response_id}?stream=true"):
        pass
    assert not is_cancelled(own_worker, response_id)
    own_worker.finish(claim)
    with openai_of(gateway) as client, ThreadPoolExecutor() as beside:
        asking = beside.submit(lambda: client.responses.create(model="", input="Go", stream=True))
        taken = own_worker.take_next()
        own_worker.send(taken, "a")
        asking.result().close()
        until(lambda: is_cancelled(own_worker, taken.request_id))


@pytest.mark.parametrize(
    ("query", "param"),
    [("starting_after=3", "starting_after"), ("stream=true&starting_after=x", "starting_after"),
     ("stream=true&starting_after=-2", "starting_after"), ("stream=perhaps", "stream")],
)  # fmt: skip
def test_wrong_queries(
    gateway: LiveGateway, own_worker: HandWorker, http: httpx2.Client, query: str, param: str
) -> None:
    with openai_of(gateway) as client, in_background(client, own_worker) as (response_id, _):
        answer = http.get(f"/v1/responses/{response_id}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
