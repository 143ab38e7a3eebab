"""The two clients, and the two queues, have the same methods, which do the same."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

from promptq import AsyncClient, AsyncRequestQueue, Client, RequestQueue
from promptq.producer.clients import async_client, sync_client
from promptq.shared.queue import request_queue

BESIDE = {"__enter__": "__aenter__", "__exit__": "__aexit__"}
APART = {"__init__", "stream", "follow", "close", "run", "take_batch"}
"""Methods that do with connections or tasks what the twin has no need for."""


class _Synchronous(ast.NodeTransformer):
    """Drops `async`, `await` and the names of asynchronous classes and functions."""

    def __init__(self, has_texts: bool) -> None:
        self._has_texts = has_texts

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        plain = ast.FunctionDef(**dict(ast.iter_fields(node)))
        return self.visit_FunctionDef(ast.copy_location(plain, node))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if not self._has_texts and ast.get_docstring(node):
            node.body = node.body[1:]
        return self.generic_visit(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        plain = ast.With(**dict(ast.iter_fields(node)))
        return self.generic_visit(ast.copy_location(plain, node))

    def visit_Await(self, node: ast.Await) -> ast.AST:
        return self.visit(node.value)  # type: ignore[no-any-return]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = node.id.removeprefix("Async").removesuffix("_async")
        return ast.Name({"asyncio": "threading"}.get(name, name), node.ctx)


def sources_of(module: Any, kind: type, has_texts: bool) -> dict[str, str]:
    """The plain source of each public method, by name."""
    [tree] = [
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    methods = [it for it in tree.body if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        it.name: ast.unparse(_Synchronous(has_texts).visit(it))
        for it in methods
        if not it.name.startswith("_") and it.name not in APART and not it.decorator_list
    }


@pytest.mark.parametrize(
    ("modules", "kinds", "has_texts"),
    [
        ((sync_client, async_client), (Client, AsyncClient), True),
        ((request_queue, request_queue), (RequestQueue, AsyncRequestQueue), False),
    ],
    ids=["clients", "queues"],
)
def test_twins_do_the_same(
    modules: tuple[Any, Any], kinds: tuple[type, type], has_texts: bool
) -> None:
    """Written out in both, so that an editor finds each; equal but for `async` and `await`."""
    ours, theirs = (
        sources_of(module, kind, has_texts) for module, kind in zip(modules, kinds, strict=True)
    )
    assert len(ours) > 10
    assert ours.keys() == theirs.keys()
    for name, source in ours.items():
        assert source == theirs[name], name


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


@pytest.mark.parametrize(
    ("kind", "async_kind", "alone"),
    [(Client, AsyncClient, {"follow"}), (RequestQueue, AsyncRequestQueue, set())],
)
def test_twins_have_the_same_methods_with_the_same_parameters(
    kind: type, async_kind: type, alone: set[str]
) -> None:
    """`follow` alone is the asynchronous client's: threads have no turns to save."""
    ours, theirs = methods_of(kind), methods_of(async_kind)
    assert theirs.keys() - ours.keys() == alone
    assert ours.keys() <= theirs.keys()
    for name, method in ours.items():
        assert parameters_of(method) == parameters_of(theirs[name]), name
        assert method.__doc__ or name.startswith("__"), name
        if name not in {"__init__", "stream"}:
            assert inspect.iscoroutinefunction(theirs[name]), name
            assert not inspect.iscoroutinefunction(method)
