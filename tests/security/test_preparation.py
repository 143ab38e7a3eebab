"""A stranger's request costs others nothing while a worker prepares it. The worker measures it
first, prepares it beside other requests, or tries it out in a process that can be killed.

Shown by order: the victim's request ends while the attacker's is still being prepared.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import (
    MAX_BAD_WORD_CHARS,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    TEMPLATE_CALL_ARGUMENTS,
    NewRequest,
    Request,
    RequestState,
)
from promptq.shared.queue.request_queue import AsyncRequestQueue, RequestQueue, new_request_id
from promptq.worker.engine.api.messages import EngineAbilities
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.leases.slow_lane import SlowLane
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.grammars import vetting
from promptq.worker.text.grammars.llguidance_calls import Vocabulary
from promptq.worker.text.grammars.schema_masks import Grammars
from promptq.worker.text.grammars.schema_patterns import num_combined_patterns
from promptq.worker.text.grammars.vetting import NotVettedError, Vetter
from promptq.worker.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from tests.support.model_free import (
    ModelFreeRunner,
    finished,
    running_worker,
    served_model_free,
    text_of,
)
from tests.support.processes import started
from tests.support.requests import async_put, put, result_of, until_active
from tests.support.roles import QueueClient, as_role
from tests.support.waiting import async_until, until
from tests.worker.text.grammars.structured import json_schema

CHAT = [{"role": "user", "content": "Hello"}]


def exploding_schema(number: int) -> dict[str, Any]:
    """To compile it takes gigabytes."""
    return {"type": "integer", "multipleOf": 10_000_019 + 2 * number}


def combined(count: int, pattern: str) -> dict[str, Any]:
    return {"allOf": [{"pattern": pattern.replace("?", it)} for it in ascii_lowercase[:count]]}


@pytest.fixture(scope="module")
def shipped_url(redis_server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server with a queue that a real worker serves with the shipped model."""
    with QueueClient.from_url(redis_server_url) as client:
        client.flushall()
        url = as_role("producer", redis_server_url)
        with started(tmp_path_factory.mktemp("worker"), url):
            yield url
        client.flushall()


@pytest.fixture
def shipped(shipped_url: str) -> Iterator[RequestQueue]:
    with QueueClient.from_url(shipped_url) as client:
        yield RequestQueue(client)


def put_raw(queue: RequestQueue, **fields: Any) -> str:
    """Enqueues like a client that checks nothing."""
    request_id, client = new_request_id(), queue.redis
    client.hset(queue.keys.request(request_id), "payload", json.dumps(fields))
    client.zadd(queue.keys.pending, {request_id: 0})
    client.publish(queue.keys.control, "pending")
    return request_id


# ---------------------------------------------------------------- chat templates


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "documents", "bos_token"])
def test_arguments_of_the_template_call_are_refused_by_client_and_worker(
    shipped: RequestQueue, name: str
) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    kwargs = {name: loops}
    says = f"chat_template_kwargs: '{name}' is not a variable"
    with pytest.raises(InvalidRequestError, match=f"^{says}"):
        Request.build({"messages": CHAT, "chat_template_kwargs": kwargs})
    attack = put_raw(shipped, messages=CHAT, chat_template_kwargs=kwargs)
    error = result_of(shipped, attack)["error"]
    assert error["type"] == "invalid_request"
    assert error["message"].startswith(says)


def test_the_arguments_are_those_of_the_installed_library() -> None:
    calls = (PreTrainedTokenizerBase.apply_chat_template, chat_template_utils.render_jinja_template)
    names = {name for call in calls for name in inspect.signature(call).parameters}
    assert names | set(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES) <= TEMPLATE_CALL_ARGUMENTS
    Request.build({"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}})


def test_a_models_own_names_are_refused_too() -> None:
    tokenizer = AutoTokenizer.from_pretrained(
        str(MODEL_DIR), extra_special_tokens={"image_token": "<image>"}
    )
    ours = HuggingFaceTokenizer(tokenizer)
    request = Request.build({"messages": CHAT, "chat_template_kwargs": {"image_token": "x"}})
    with pytest.raises(InvalidRequestError, match=r"^chat_template_kwargs: 'image_token'"):
        ours.encode_prompt(request)


async def test_a_models_template_renders_under_a_limit_beside_others(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_DIR))
    loops = "{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = f"{{% for a in messages %}}{loops}{{% endfor %}}"
    served = replace(served_model_free(), tokenizer=HuggingFaceTokenizer(tokenizer))
    async with running_worker(redis_url, served):
        attack = await async_put(queue, messages=CHAT * MAX_MESSAGES)
        await until_active(queue, attack)
        victim = await async_put(queue, prompt=[97], max_tokens=3)
        assert (await finished(queue, victim))["finish_reason"] == "length"
        assert await queue.state(attack) is RequestState.ACTIVE
        error = (await finished(queue, attack))["error"]
        assert error["message"].startswith("messages: take too long to render: ")


# ---------------------------------------------------------------- schemas


def test_a_schema_that_explodes_fails_alone_while_others_are_served(shipped: RequestQueue) -> None:
    attacks = [
        put(shipped, response_format=json_schema(exploding_schema(number))) for number in range(6)
    ]
    until(lambda: shipped.state(attacks[0]) is RequestState.ACTIVE)
    answer = json_schema({"enum": ["yes", "no"]})
    victims = [put(shipped, max_tokens=3), put(shipped, prompt=None, messages=CHAT, max_tokens=3)]
    for victim in victims:
        assert result_of(shipped, victim)["finish_reason"] in ("length", "stop")
    states = [shipped.state(attack) for attack in attacks]
    assert RequestState.ACTIVE in states, "the victims ended while they were being prepared"
    for attack in attacks[1:]:
        shipped.cancel(attack)
    error = result_of(shipped, attacks[0])["error"]
    assert error["type"] == "unsupported"
    assert error["message"].startswith("response_format: takes too long to compile: ")
    assert json.loads(result_of(shipped, put(shipped, response_format=answer))["text"])


@pytest.mark.parametrize("pattern", [".*w?.*", "^([a-x]{0,9}|z{30,}y.*w?.*)$"])
def test_patterns_that_one_text_must_match_together_are_few(
    shipped: RequestQueue, pattern: str
) -> None:
    """The first explodes when compiled, the second when a text has got so far, in a step."""
    schemas = [combined(18, pattern), {"$defs": combined(18, pattern), "$ref": "#/$defs"}]
    schemas.append({"type": "object", "properties": {"a": combined(18, pattern)}})
    for schema in schemas:
        error = result_of(shipped, put(shipped, response_format=json_schema(schema)))["error"]
        assert error["type"] == "unsupported"
        assert error["message"].startswith("response_format: takes too long to compile: ")


def test_only_patterns_that_may_meet_are_counted() -> None:
    apart = {letter: {"type": "string", "pattern": f"^{letter}$"} for letter in ascii_lowercase}
    optional = {name: {"anyOf": [it, {"type": "null"}], "title": "x"} for name, it in apart.items()}
    assert num_combined_patterns({"type": "object", "properties": apart}) == 0
    assert num_combined_patterns({"type": "object", "properties": optional}) == 0
    nested: dict[str, Any] = {"pattern": "x"}
    for letter in ascii_lowercase:
        nested = {"pattern": letter, "anyOf": [nested, {"type": "null"}]}
    for schema in (
        {"properties": optional, "allOf": [{"type": "object"}]},
        {"patternProperties": apart},
        {"$defs": {"a": {"pattern": "a"}}, "$ref": "#/$defs/a", "properties": apart},
        nested,
    ):
        assert num_combined_patterns(schema) >= len(apart)


@pytest.fixture(scope="module")
def vetter() -> Iterator[Vetter]:
    tokenizer = HuggingFaceTokenizer.load(str(MODEL_DIR))
    vetter = Vetter(Vocabulary(tokenizer.as_json() or "", tokenizer.num_tokens, [2]))
    yield vetter
    vetter.close()


def grammar(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(schema)


def test_vetting_says_what_the_library_says_and_outlives_its_process(vetter: Vetter) -> None:
    assert vetter.vet(grammar({"type": "integer"})) == ""
    assert "Unimplemented keys" in vetter.vet(grammar({"not": {}}))
    with pytest.raises(NotVettedError, match=r"^takes too long to compile: "):
        vetter.vet(grammar(exploding_schema(0)))
    assert vetter.vet(grammar({"type": "integer"})) == ""


def test_a_vetting_process_that_dies_by_itself_is_no_verdict() -> None:
    broken = Vetter(Vocabulary("this is no tokenizer", 2048, [2]))
    with pytest.raises(NotVettedError, match=r"^could not be tested") as caught:
        broken.vet(grammar({"type": "integer"}))
    assert not caught.value.is_certain
    broken.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_who_ends_the_vetting_process_refuses_no_schema(
    vetter: Vetter, number: signal.Signals
) -> None:
    """systemd signals all processes of a unit, and a kernel without memory kills single ones."""
    assert vetter.vet(grammar({"type": "integer"})) == ""
    before = vetter._process
    assert before is not None
    before.send_signal(number)
    if number is signal.SIGKILL:
        before.wait()
    assert vetter.vet(grammar({"type": "integer"})) == ""
    assert (vetter._process is before) == (number is not signal.SIGKILL), "the others are ignored"


def test_a_machine_too_busy_to_vet_refuses_no_schema_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vetting, "_WALL_SECONDS", 0.0)
    tokenizer = HuggingFaceTokenizer.load(str(MODEL_DIR))
    grammars = Grammars(tokenizer, 2048, frozenset({2}), vets=True)
    wanted = Request.build({"prompt": "a", "response_format": json_schema({"type": "integer"})})
    assert wanted.wanted_output is not None
    with pytest.raises(InvalidRequestError, match="too busy; send the request again") as caught:
        grammars.start(wanted.wanted_output, frozenset())
    assert caught.value.error_type == "internal_error"
    monkeypatch.undo()
    grammars.start(wanted.wanted_output, frozenset())
    grammars.close()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="it is read there")
def test_the_vetting_process_does_not_get_the_address_of_redis(
    vetter: Vetter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMPTQ_REDIS_URL", "redis://:secret@127.0.0.1/0")
    vetter.close()
    assert vetter.vet(grammar({"type": "integer"})) == ""
    assert vetter._process is not None
    process = Path(f"/proc/{vetter._process.pid}")
    assert b"secret" not in (process / "environ").read_bytes()
    assert re.search(r"Max core file size +0 +0", (process / "limits").read_text())


# ---------------------------------------------------------------- lengths


class CountingTokenizer(HuggingFaceTokenizer):
    longest = 0

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.longest = max(self.longest, len(text))
        return super().encode_text(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_prompt_that_cannot_fit_is_never_tokenised(field: str) -> None:
    tokenizer = CountingTokenizer(AutoTokenizer.from_pretrained(str(MODEL_DIR)), 2048)
    text = "Once upon a time. " * 330_000
    value = text if field == "prompt" else [{"role": "user", "content": text}]
    with pytest.raises(InvalidRequestError, match=f"^{field}: .* characters") as caught:
        tokenizer.encode_prompt(Request.build({field: value}))
    assert caught.value.code == "context_length_exceeded"
    assert tokenizer.longest == 0
    fits = Request.build({"prompt": "Once upon a time. " * 300})
    assert 1024 < len(tokenizer.encode_prompt(fits)) < 2048


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", ["x" * 27_000] * 256),
        ("bad_words", ["x" * MAX_BAD_WORD_CHARS] * 65),
        ("stop", "x" * (MAX_STOP_CHARS + 1)),
        ("stop", ["x" * MAX_STOP_CHARS] * 9),
        ("logit_bias", {str(n): 1.0 for n in range(MAX_LOGIT_BIAS + 1)}),
        ("messages", CHAT * (MAX_MESSAGES + 1)),
        ("tools", [{}] * 1025),
    ],
)
def test_lengths_and_counts_are_bounded(field: str, value: Any) -> None:
    fields = {"messages": CHAT, field: value}
    for read in (Request.build, lambda it: Request.parse(json.dumps(it))):
        with pytest.raises(InvalidRequestError, match=f"^{field}: "):
            read(fields)


def test_a_real_worker_refuses_at_once_what_has_too_many_values(shipped: RequestQueue) -> None:
    """Each becomes an object of the parser, which no other thread gets in between."""
    lists = put_raw(shipped, prompt="a", metadata={"a": [[]] * 2_000_000})
    ids = put_raw(shipped, prompt=[1] * 2_000_000)
    text = put_raw(shipped, prompt='\\",' * 20_000, max_tokens=1)
    for attack in (lists, ids):
        message = result_of(shipped, attack)["error"]["message"]
        assert message.startswith("payload: holds more than "), message
    message = result_of(shipped, text)["error"]["message"]
    assert message.startswith("prompt: "), "commas within a text are no values"


# ---------------------------------------------------------------- the slow lane


class StandingTokenizer(ByteTokenizer):
    """Stands at prompts that begin with `wait` until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.standing: list[str] = []

    def encode_prompt(self, request: Request) -> list[int]:
        if isinstance(request.prompt, str) and request.prompt.startswith("wait"):
            self.standing.append(request.tenant or "")
            self.go_on.wait()
            return [97]
        return super().encode_prompt(request)


LONG = "wait" + " " * 100_000


async def test_a_long_preparation_holds_up_neither_short_nor_other_tenants_long_ones(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Nor does it take room: each of these prompts would fill the KV cache by its estimate."""
    tokenizer = StandingTokenizer()
    served = replace(served_model_free(num_blocks=64), tokenizer=tokenizer)
    async with running_worker(redis_url, served):
        attacks = [await async_put(queue, prompt=LONG, tenant="a", max_tokens=1) for _ in range(5)]
        await async_until(lambda: len(tokenizer.standing) >= 2)
        short = await async_put(queue, prompt="a", seed=1, max_tokens=3, tenant="b")
        assert (await finished(queue, short))["text"] == text_of(1, 3)
        same = await async_put(queue, prompt="a", seed=2, max_tokens=3, tenant="a")
        assert (await finished(queue, same))["text"] == text_of(2, 3)
        long = await async_put(queue, prompt=LONG, tenant="b", max_tokens=1)
        await async_until(lambda: "b" in tokenizer.standing)
        assert tokenizer.standing.count("a") == 2, "a tenant leaves threads to others"
        tokenizer.go_on.set()
        for request_id in [*attacks, long]:
            assert (await finished(queue, request_id))["finish_reason"] == "length"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("tenant", ["a", None])
async def test_more_long_preparations_than_a_worker_has_place_for_take_no_slots(
    redis_url: str, queue: AsyncRequestQueue, tenant: str | None
) -> None:
    """They wait in the queue again, and behind them ordinary requests of anybody are served."""
    tokenizer = StandingTokenizer()
    served = replace(served_model_free(), tokenizer=tokenizer)
    async with running_worker(redis_url, served) as worker:
        num_attacks = 100 + served.engine.limits.max_num_seqs
        of_attacker = {} if tenant is None else {"tenant": tenant}
        attack = Request.build({"prompt": LONG[:33_000], "max_tokens": 1, **of_attacker})
        attacks = [NewRequest(new_request_id(), attack) for _ in range(num_attacks)]
        await queue.enqueue(attacks)
        await async_until(lambda: len(tokenizer.standing) >= 2)
        for seed, of in enumerate(({"tenant": "b"}, of_attacker)):
            victim = await async_put(queue, prompt="a", seed=seed, max_tokens=3, **of)
            assert (await finished(queue, victim))["text"] == text_of(seed, 3)
        assert len(tokenizer.standing) == 2, "all others still wait"
        assert worker.leases.num_counted <= served.engine.limits.max_num_seqs
        tokenizer.go_on.set()

        async def has_ended(request_id: str) -> bool:
            """Lets all delays pass, which may be a minute long."""
            if delayed := await queue.redis.zrange(queue.keys.delayed, 0, -1):
                await queue.redis.zadd(queue.keys.delayed, dict.fromkeys(delayed, 1), xx=True)
            state = await queue.state(request_id)
            return state is not None and state.is_final

        for new in attacks:
            await async_until(partial(has_ended, new.request_id))
            assert (await finished(queue, new.request_id))["finish_reason"] == "length"


async def test_what_is_put_off_comes_back_one_after_the_other() -> None:
    lane = SlowLane()
    assert not lane.has_put_off
    seconds = [lane.put_off("a") for _ in range(20_000)]
    assert lane.has_put_off
    assert 0 < seconds[0] < seconds[100] < seconds[1000] < 61
    assert seconds[-1] < 61, "nothing is put off for ever"
    assert lane.put_off("b") < seconds[100], "a tenant stands only behind itself"


async def test_a_lane_that_stands_puts_off_for_longer() -> None:
    """Otherwise a worker with a slow server claims the same requests again and again, and never
    those behind them."""
    lane, go_on = SlowLane(), threading.Event()
    standing = [asyncio.create_task(lane.run("a", go_on.wait)) for _ in range(2)]
    await async_until(lambda: len(lane._running.get("a", ())) == 2)
    await asyncio.sleep(1.0)
    lane.put_off("a")
    before = lane._put_off_until["a"]
    lane.put_off("a")
    go_on.set()
    await asyncio.gather(*standing)
    assert lane._put_off_until["a"] - before >= 0.5, "half of the time that both have taken"


async def test_turns_go_by_tenant() -> None:
    lane, started_in, gates = SlowLane(), list[str](), dict[str, threading.Event]()

    def stand(name: str) -> None:
        started_in.append(name)
        gates[name].wait()

    async def run(name: str) -> None:
        gates[name] = threading.Event()
        await lane.run(name[0], lambda: stand(name))

    async def until_started(*names: str) -> None:
        await async_until(lambda: {*names} <= {*started_in})

    tasks = [asyncio.create_task(run(name)) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "d1")]
    await until_started("a1", "a2", "b1", "c1")
    gates["b1"].set()
    await until_started("d1")
    tasks[2].cancel()  # a3, which waits
    gates["a1"].set()
    await until_started("a4")
    assert started_in == ["a1", "a2", "b1", "c1", "d1", "a4"]
    for gate in gates.values():
        gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not lane._running


class HeldToSchemas(ModelFreeRunner):
    """Says that it can be; nobody gets as far as that."""

    abilities = EngineAbilities()


async def test_a_worker_that_stops_gives_back_what_it_prepares(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    tokenizer = HuggingFaceTokenizer.load(str(MODEL_DIR))
    grammars = Grammars(tokenizer, 2048, frozenset({2}), vets=True)
    engine = LLMEngine(HeldToSchemas(), max_num_seqs=4, max_num_batched_tokens=64)
    served = replace(served_model_free(), engine=engine, tokenizer=tokenizer, grammars=grammars)
    async with running_worker(redis_url, served):
        attacks = [
            await async_put(
                queue, prompt="a", response_format=json_schema(exploding_schema(number))
            )
            for number in range(4)
        ]
        await until_active(queue, attacks[-1])
    states = [await queue.state(attack) for attack in attacks]
    assert RequestState.WAITING in states
    assert RequestState.ACTIVE not in states
    await asyncio.to_thread(grammars.close)


NOTHING_TO_SAY: list[dict[str, Any]] = [
    {"response_format": json_schema({"$ref": "#"})},
    {"response_format": json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})},
    {"response_format": json_schema({"type": "string", "pattern": "(.*[aeiou].{60}){9}"})},
    {
        "response_format": json_schema(
            {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(3000)}}
        )
    },
    {"response_format": {"type": "json_object"}, "bad_words": ["{", " {"]},
]


@pytest.mark.parametrize("fields", NOTHING_TO_SAY, ids=["self", "circle", "long", "wide", "banned"])
def test_what_leaves_nothing_to_say_is_the_fault_of_the_request(
    shipped: RequestQueue, fields: dict[str, Any]
) -> None:
    """And none of the worker's: a gateway answers 400, not 500."""
    result = result_of(shipped, put(shipped, prompt="Once", max_tokens=20, **fields))
    assert result["finish_reason"] == "error"
    assert result["error"]["type"] == "unsupported", result["error"]
    assert result["error"]["message"].startswith("response_format"), result["error"]
