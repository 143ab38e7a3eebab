"""The two clients, and the two queues, are the same to whoever calls them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from promptq import AsyncClient, AsyncRequestQueue, Client, RequestQueue
from promptq.producer.clients import operations

BESIDE = {"__enter__": "__aenter__", "__exit__": "__aexit__"}
OF_ITS_OWN = {"stream", "close", "__init__"}
"""What a client does with connections of its own kind, and so says for itself."""


def methods_of(kind: type) -> dict[str, Any]:
    names = {name: it for name, it in vars(kind).items() if inspect.isfunction(it)}
    return {
        BESIDE.get(name, name): it
        for name, it in names.items()
        if not name.startswith("_") or name in ("__init__", *BESIDE, *BESIDE.values())
    }


def parameters_of(method: Any) -> list[inspect.Parameter]:
    own_kinds = {"redis.asyncio.Redis": "redis.Redis", "asyncio.Event": "threading.Event"}
    found = []
    for it in inspect.signature(method).parameters.values():
        annotation = str(it.annotation)
        for async_kind, kind in own_kinds.items():
            annotation = annotation.replace(async_kind, kind)
        found.append(it.replace(annotation=annotation))
    return found


def test_the_clients_have_the_same_methods_with_the_same_parameters_and_texts() -> None:
    """`follow` alone is the asynchronous client's: threads have no turns to save."""
    ours, theirs = methods_of(Client), methods_of(AsyncClient)
    assert theirs.keys() - ours.keys() == {"follow"}
    assert ours.keys() - theirs.keys() == set()
    for name, method in ours.items():
        assert parameters_of(method) == parameters_of(theirs[name]), name
        if name in OF_ITS_OWN or name.startswith("__"):
            continue
        assert method.__doc__ == theirs[name].__doc__, name
        assert method.__doc__, name
        returned = inspect.signature(method).return_annotation
        assert returned == inspect.signature(theirs[name]).return_annotation, name
        assert inspect.iscoroutinefunction(theirs[name])
        assert not inspect.iscoroutinefunction(method)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_each_operation_is_a_method_that_shows_it(kind: type) -> None:
    """By its own name: `help` says what `operations` says."""
    found: Mapping[str, Any] = {
        name: it for name, it in vars(operations).items() if inspect.isgeneratorfunction(it)
    }
    assert methods_of(kind).keys() >= found.keys()
    assert len(found) > 20
    for name, operation in found.items():
        method = getattr(kind, name)
        assert (method.__name__, method.__doc__) == (name, operation.__doc__)
        _, *expected = inspect.signature(operation).parameters.values()
        _, *shown = inspect.signature(method).parameters.values()
        assert shown == expected
        given = inspect.signature(method).return_annotation
        assert inspect.signature(operation).return_annotation == f"Operation[{given}]"


def test_the_queues_have_the_same_methods_with_the_same_parameters() -> None:
    ours, theirs = methods_of(RequestQueue), methods_of(AsyncRequestQueue)
    assert ours.keys() == theirs.keys()
    for name, method in ours.items():
        assert parameters_of(method) == parameters_of(theirs[name]), name
        if name != "__init__":
            assert inspect.iscoroutinefunction(theirs[name]), name
            returned = inspect.signature(method).return_annotation
            assert returned == inspect.signature(theirs[name]).return_annotation, name
