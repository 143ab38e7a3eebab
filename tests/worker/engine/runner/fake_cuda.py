"""Stands where `torch.cuda` would, and records what is asked of it. The CPU computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import repeat
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


class Graph(TorchDispatchMode):
    """Records the operations of a capture. A replay repeats them, on the same tensors and with the
    same numbers, and writes to where the results of the capture lie."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        self._operations.append((func, args, kwargs or {}, result))
        return result

    @contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as monkeypatch, self:
            if find_spec("triton") is not None:
                from triton.runtime.interpreter import InterpretedFunction

                launch = InterpretedFunction.run

                def run(*args: Any, **kwargs: Any) -> None:
                    with _disable_current_modes():
                        launch(*args, **kwargs)
                    self._operations.append((launch, args, kwargs, None))

                monkeypatch.setattr(InterpretedFunction, "run", run)
            yield

    def replay(self) -> None:
        self._cuda.replayed.append(self)
        for func, args, kwargs, result in self._operations:
            again = func(*args, **kwargs)
            for there, now in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(there, torch.Tensor) and there.data_ptr() != now.data_ptr():
                    there.copy_(now)


@dataclass
class FakeCuda:
    """One thread's view of the driver. A capture that breaks leaves behind what torch leaves."""

    breaks_captures: bool = False
    stream: Stream = field(default_factory=Stream)
    devices: list[Any] = field(default_factory=lambda: [torch.device("cuda", 0)])
    """The last one is current."""
    sync_debug_mode: int | str = 0
    open_pools: list[object] = field(default_factory=list)
    """Into which the allocator still puts what is allocated."""
    captured: list[tuple[Graph, Stream, object]] = field(default_factory=list)
    replayed: list[Graph] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Calls to the allocator and the driver. Their answers are the figures below."""
    reserved: int = 0
    allocated: int = 0
    peak: int = 0
    free: Iterator[int] = field(default_factory=lambda: repeat(1 << 30))

    def wait(self) -> None:
        """Does what an operation does that needs a value of the device on the host."""
        if self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation\nin C++")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, replacement in {
            "Stream": Stream,
            "current_stream": lambda: self.stream,
            "set_stream": self._set_stream,
            "stream": self._on_stream,
            "CUDAGraph": lambda: Graph(self),
            "graph": self._capture,
            "graph_pool_handle": object,
            "get_sync_debug_mode": lambda: self.sync_debug_mode,
            "set_sync_debug_mode": self._set_sync_debug_mode,
            "device": self._on_device,
            "current_device": lambda: self.devices[-1].index,
            "empty_cache": lambda: self._answer("empty_cache", None),
            "reset_peak_memory_stats": lambda _: self._answer("reset_peak_memory_stats", None),
            "memory_reserved": lambda _: self._answer("memory_reserved", self.reserved),
            "memory_allocated": lambda _: self._answer("memory_allocated", self.allocated),
            "max_memory_allocated": lambda _: self._answer("max_memory_allocated", self.peak),
            "mem_get_info": lambda _: self._answer("mem_get_info", (next(self.free), 0)),
        }.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        end = "_cuda_endAllocateToPool"
        monkeypatch.setattr(torch._C, end, self._end_allocating, raising=False)

    def _answer(self, question: str, answer: Any) -> Any:
        self.asked.append(question)
        return answer

    def _set_stream(self, stream: Stream) -> None:
        self.stream = stream

    def _set_sync_debug_mode(self, mode: int | str) -> None:
        self.sync_debug_mode = mode

    def _end_allocating(self, device: int, pool: object) -> None:
        self.open_pools.remove(pool)

    @contextmanager
    def _on_device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield
        self.devices.pop()

    @contextmanager
    def _on_stream(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    @contextmanager
    def _capture(self, graph: Graph, pool: object, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        self.open_pools.append(pool)
        self.captured.append((graph, stream, pool))
        with graph.recording():
            yield
        if self.breaks_captures:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.open_pools.remove(pool)
        self.stream = before
