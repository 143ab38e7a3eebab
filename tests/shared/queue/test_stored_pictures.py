"""Large pictures are stored once, for as long as requests need them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import redis

from promptq.producer.admin.queue_control import reprioritise
from promptq.producer.clients.forks import fork_source
from promptq.producer.clients.request_builder import compose
from promptq.shared.errors import InvalidRequestError, QueueFullError, RequestExistsError
from promptq.shared.protocol.claims import Claim, ClaimContext, ModelIdentity
from promptq.shared.protocol.pictures import data_url, picture_part
from promptq.shared.protocol.request import FinishReason, Request, RequestState
from promptq.shared.queue import scripts
from promptq.shared.queue.call import carry_out
from promptq.shared.queue.request_queue import RequestQueue
from tests.programs.engines.pngs import png
from tests.support.requests import ROOM, put_plainly, row

LARGE, OTHER = (data_url(png(seed, 230, 230)) for seed in (1, 2))
SMALL = data_url(png(1))


def messages_of(*urls: str, text: str = "What is this?") -> list[dict[str, Any]]:
    parts = [*map(picture_part, urls), {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def ask(queue: RequestQueue, request_id: str, *urls: str, **fields: Any) -> str:
    chat = {"request_id": request_id, "messages": messages_of(*urls), **fields}
    return queue.enqueue(compose([chat]))[0]


def key_of(queue: RequestQueue, url: str, tenant: str = "") -> str:
    """Returns the key of the protocol for a picture."""
    name = hashlib.sha256(f"{tenant}\n{url}".encode()).hexdigest()
    return f"{queue.keys.prefix}picture:{name}"


def keys_in(client: Any, queue: RequestQueue) -> set[str]:
    return {key.decode() for key in client.keys(f"{queue.keys.prefix}picture:*")}


def urls_in(claim: Claim) -> list[str]:
    content = json.loads(claim.payload)["messages"][0]["content"]
    return [part["image_url"]["url"] for part in content if part["type"] == "image_url"]


def finish(queue: RequestQueue, *claims: Claim) -> None:
    queue.publish([row(claim, 0, reason=FinishReason.STOP) for claim in claims])


def crash(client: Any, queue: RequestQueue, claims: list[Claim]) -> None:
    client.zadd(queue.keys.leases, {claim.request_id: 1 for claim in claims})
    queue.reap()


def bury(client: Any, queue: RequestQueue, request_id: str) -> None:
    client.hset(queue.keys.config, "crash_backoff_ms", "0")
    for _ in range(3):
        crash(client, queue, queue.take_batch(ROOM))
    assert queue.state(request_id) is RequestState.DEAD


def sweep(queue: RequestQueue) -> None:
    swept = queue.sweep()
    while swept.cursor != "0":
        swept = queue.sweep(swept.cursor)


def test_two_requests_share_one_picture_until_both_have_ended(
    client: Any, queue: RequestQueue
) -> None:
    ask(queue, "a", LARGE, SMALL)
    ask(queue, "b", OTHER, LARGE, LARGE)
    shared = key_of(queue, LARGE)
    assert keys_in(client, queue) == {shared, key_of(queue, OTHER)}
    for request_id in ("a", "b"):
        payload = client.hget(queue.keys.request(request_id), "payload")
        assert len(payload) < len(SMALL) + 500
        assert LARGE.encode() not in payload
        assert any(picture.is_stored for picture in Request.parse(payload).pictures)
    a, b = queue.take_batch(ROOM)
    assert urls_in(a) == [LARGE, SMALL]
    assert urls_in(b) == [OTHER, LARGE, LARGE]
    finish(queue, a)
    assert client.pttl(shared) == -1
    finish(queue, b)
    for key in keys_in(client, queue):
        assert 0 < client.pttl(key) <= 3_600_000
    ask(queue, "c", LARGE)
    assert client.pttl(shared) == -1


def test_a_picture_is_claimed_again_with_each_attempt(client: Any, queue: RequestQueue) -> None:
    ask(queue, "a", LARGE)
    (first,) = queue.take_batch(ROOM)
    crash(client, queue, [first])
    (second,) = queue.take_batch(ROOM)
    assert second.attempt == 2
    assert second.payload == first.payload
    assert client.pttl(key_of(queue, LARGE)) == -1


@pytest.mark.parametrize("how", ["cancelled", "expired", "removed"])
def test_a_request_that_ends_without_a_worker_lets_its_picture_go(
    client: Any, queue: RequestQueue, how: str
) -> None:
    ask(queue, "a", LARGE)
    key = key_of(queue, LARGE)
    assert client.pttl(key) == -1
    if how == "expired":
        client.zadd(queue.keys.deadlines, {"a": 1})
        queue.reap()
    else:
        (queue.cancel if how == "cancelled" else queue.remove)("a")
    assert client.pttl(key) > 0


def test_tenants_share_no_picture(client: Any, queue: RequestQueue) -> None:
    ask(queue, "a", LARGE, tenant="a")
    ask(queue, "b", LARGE, tenant="b")
    assert keys_in(client, queue) == {key_of(queue, LARGE, "a"), key_of(queue, LARGE, "b")}
    assert [urls_in(claim) for claim in queue.take_batch(ROOM)] == [[LARGE]] * 2


def test_a_producer_cannot_name_a_picture_that_it_does_not_send(queue: RequestQueue) -> None:
    ask(queue, "a", LARGE)
    named = "sha256:" + key_of(queue, LARGE).rpartition(":")[2]
    with pytest.raises(InvalidRequestError, match=rf"^messages: the picture {named} is not stored"):
        ask(queue, "b", named)


@pytest.mark.parametrize("how", ["full", "exists", "known"])
def test_what_is_not_enqueued_stores_no_picture(client: Any, queue: RequestQueue, how: str) -> None:
    ask(queue, "a", SMALL, idempotency_key="k")
    if how == "full":
        client.hset(queue.keys.config, "max_pending", "1")
        with pytest.raises(QueueFullError):
            ask(queue, "b", LARGE)
    elif how == "exists":
        with pytest.raises(RequestExistsError):
            ask(queue, "a", LARGE)
    else:
        assert ask(queue, "b", LARGE, idempotency_key="k") == "a"
    assert keys_in(client, queue) == set()


def test_a_dead_letter_keeps_its_picture_for_a_requeue(client: Any, queue: RequestQueue) -> None:
    ask(queue, "a", LARGE)
    key = key_of(queue, LARGE)
    bury(client, queue, "a")
    sweep(queue)
    assert client.pttl(key) == -1
    queue.requeue("a")
    assert client.pttl(key) == -1
    (claim,) = queue.take_batch(ROOM)
    assert urls_in(claim) == [LARGE]
    finish(queue, claim)
    assert client.pttl(key) > 0


def test_a_purge_deletes_the_picture_of_a_dead_letter_alone(
    client: Any, queue: RequestQueue
) -> None:
    ask(queue, "a", LARGE, OTHER)
    bury(client, queue, "a")
    ask(queue, "b", OTHER)
    queue.purge(["a"])
    assert keys_in(client, queue) == {key_of(queue, OTHER)}
    assert [urls_in(claim) for claim in queue.take_batch(ROOM)] == [[OTHER]]


@pytest.mark.parametrize("is_over", [False, True])
def test_a_fork_has_the_pictures_of_its_source(
    client: Any, queue: RequestQueue, is_over: bool
) -> None:
    ask(queue, "a", LARGE, SMALL, temperature=0.0)
    (claim,) = queue.take_batch(ROOM)
    (finish if is_over else lambda queue, claim: queue.publish([row(claim, 0)]))(queue, claim)
    source = carry_out(fork_source(queue.keys, "a"), queue.run)
    queue.enqueue([source.compose_fork(1, " more", {"request_id": "b"})])
    if not is_over:
        queue.publish([row(claim, 1, reason=FinishReason.STOP)])
    assert client.pttl(key_of(queue, LARGE)) == -1
    (fork,) = queue.take_batch(ROOM)
    assert urls_in(fork) == [LARGE, SMALL]


def test_a_fork_without_its_source_s_picture_is_refused(client: Any, queue: RequestQueue) -> None:
    ask(queue, "a", LARGE)
    finish(queue, *queue.take_batch(ROOM))
    client.delete(key_of(queue, LARGE))
    source = carry_out(fork_source(queue.keys, "a"), queue.run)
    with pytest.raises(InvalidRequestError, match=r"^messages: the picture sha256:"):
        source.compose_fork(1, "", {})


def test_a_change_of_priority_keeps_the_picture(queue: RequestQueue) -> None:
    ask(queue, "a", LARGE)
    carry_out(reprioritise(queue.keys, "a", -1), queue.run)
    (claim,) = queue.take_batch(ROOM)
    assert urls_in(claim) == [LARGE]


def test_plain_commands_store_a_picture(client: Any, queue: RequestQueue) -> None:
    key = key_of(queue, LARGE)
    name = key.rpartition(":")[2]
    client.hset(key, mapping={"url": LARGE, "request:a": ""})
    client.hset(queue.keys.request("a"), "pictures", name)
    chat = {"messages": messages_of(f"sha256:{name}", text=f"sha256:{name}")}
    put_plainly(client, queue, "a", 1, json.dumps(chat, indent=1))
    sweep(queue)
    assert client.pttl(key) == -1
    (claim,) = queue.take_batch(ROOM)
    assert json.loads(claim.payload)["messages"] == messages_of(LARGE, text=f"sha256:{name}")
    finish(queue, claim)
    assert client.pttl(key) > 0


def test_a_picture_repeated_without_end_is_cut_off(everything: redis.Redis) -> None:
    client: Any = everything
    queue = RequestQueue(client)
    key = key_of(queue, LARGE)
    name = key.rpartition(":")[2]
    client.hset(key, mapping={"url": LARGE, "request:a": ""})
    client.hset(queue.keys.request("a"), "pictures", name)
    chat = {"messages": messages_of(*[f"sha256:{name}"] * 1000)}
    put_plainly(client, queue, "a", 1, json.dumps(chat))
    (claim,) = queue.take_batch(ROOM)
    assert 8 * 2**20 < len(claim.payload) < 9 * 2**20


def test_a_sweep_lets_go_of_pictures_whose_requests_are_gone(
    client: Any, queue: RequestQueue
) -> None:
    for request_id in ("deleted", "kept"):
        ask(queue, request_id, LARGE)
    ask(queue, "alone", OTHER)
    client.delete(queue.keys.request("deleted"), queue.keys.request("alone"))
    sweep(queue)
    assert client.pttl(key_of(queue, LARGE)) == -1
    assert client.pttl(key_of(queue, OTHER)) > 0
    assert set(client.hkeys(key_of(queue, LARGE))) == {b"url", b"request:kept"}


def test_a_key_of_another_type_is_replaced(client: Any, queue: RequestQueue) -> None:
    client.set(key_of(queue, LARGE), "text")
    ask(queue, "a", LARGE)
    assert [urls_in(claim) for claim in queue.take_batch(ROOM)] == [[LARGE]]


def test_a_lost_reply_of_a_claim_is_repeated_with_the_picture(queue: RequestQueue) -> None:
    ask(queue, "a", LARGE)
    call = scripts.claim("w1", 10_000, ROOM, "n1", "", ModelIdentity(), ClaimContext("s", "", 0, 1))
    first, second = queue.run(call), queue.run(call)
    assert urls_in(first[0]) == urls_in(second[0]) == [LARGE]


def test_a_stored_picture_counts_as_a_short_text(client: Any, queue: RequestQueue) -> None:
    ask(queue, "none", max_tokens=1)
    ask(queue, "one", LARGE, max_tokens=1)
    ask(queue, "two", LARGE, LARGE, max_tokens=1)
    none, one, two = (
        int(client.hget(queue.keys.request(each), "tokens")) for each in ("none", "one", "two")
    )
    assert 1024 < one - none < 1064
    assert 1024 < two - one < 1064
    costs = {claim.request_id: claim.cost for claim in queue.take_batch(ROOM)}
    assert costs["one"] < 1064 + 300
