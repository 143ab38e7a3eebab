"""The functions that read a call and create its id, for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from promptq.producer.apis.completions.read import read_chat, read_completion
from promptq.producer.apis.embeddings.read import (
    read_embedding_call,
    read_rerank_call,
    read_score_call,
)
from promptq.producer.apis.messages.read import NAMES as MESSAGE_NAMES
from promptq.producer.apis.messages.read import read_count_call, read_message_call
from promptq.producer.apis.responses.read import read_input_count, read_response
from promptq.producer.apis.responses.response_call import NewResponse, new_response_id
from promptq.producer.calls.call import CompletionCall
from promptq.producer.calls.call_body import Body, wrong_field
from promptq.producer.calls.call_reader import Read, Reader, Readers
from promptq.producer.calls.completion import new_completion_id, new_message_id
from promptq.shared.queue.request_queue import new_request_id


def _without_history(read: Callable[[Body, Mapping[str, str]], CompletionCall]) -> Read:
    """Returns a `Read` that calls `read` without the new id and the history (earlier items)."""
    return lambda body, headers, new_id, history: read(body, headers)


def _read_message_fork(body: Body, headers: Mapping[str, str]) -> CompletionCall:
    """Parses a call that forks a message. Its body is a chat, and its answer is a message."""
    call = read_chat(body, headers)
    if call.n > 1:
        raise wrong_field("n", "is not a field of messages")
    return replace(call, form="message", names=MESSAGE_NAMES)


def _read_quoted(body: Body, headers: Mapping[str, str]) -> CompletionCall:
    """Parses a chat if the body has messages, or else a completion."""
    read = read_chat if "messages" in body.members else read_completion
    return read(body, headers)


def _new_id(prefix: str) -> str:
    return prefix + new_request_id()


READERS: Readers = {
    "completions": Reader(_without_history(read_completion), partial(new_completion_id, False)),
    "chats": Reader(_without_history(read_chat), partial(new_completion_id, True)),
    "embeddings": Reader(_without_history(read_embedding_call), partial(_new_id, "embd-")),
    "reranks": Reader(_without_history(read_rerank_call), partial(_new_id, "rerank-")),
    "scores": Reader(_without_history(read_score_call), partial(_new_id, "score-")),
    "messages": Reader(_without_history(read_message_call), new_message_id),
    "message_forks": Reader(_without_history(_read_message_fork), new_message_id),
    "counts": Reader(_without_history(read_count_call), new_message_id),
    "quotes": Reader(_without_history(_read_quoted), partial(new_completion_id, True)),
    "responses": Reader(read_response, new_response_id, NewResponse.unpack),
    "input_counts": Reader(read_input_count, new_response_id),
}
