"""Starts the real servers on the shipped model in fp32, for tests and for chaos."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

import httpx2

from benchmarks.lib.gguf_file import gguf_file
from benchmarks.lib.peers import DEFAULT as PEERS
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.upstream.server_process import server_environment
from tests.support.processes import start
from tests.support.servers import free_port
from tests.support.waiting import until
from tests.worker.engine.tiny_models import generate

NAMES = ("vllm", "llama.cpp", "sglang")
SLOTS, LENGTH = 16, 1024
NUM_TOKENS = 120
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
_FOLDERS = {"vllm": "vllm", "llama.cpp": "llama", "sglang": "sglang"}


def why_missing(name: str) -> str:
    """Returns the reason why a server or library is not installed; empty if it is installed."""
    folder = PEERS / _FOLDERS.get(name, name)
    missing = folder.with_suffix(".missing")
    if missing.exists():
        return missing.read_text().strip()
    return "" if folder.exists() else "it is not built: python -m benchmarks peers"


@dataclass
class RealServer:
    """A server that can be killed and started again at the same address."""

    name: str
    folder: Path
    model: Path = MODEL_DIR
    slots: int = SLOTS
    length: int = LENGTH
    arguments: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        command, environment = self._command()
        self._log = (self.folder / f"{self.name}.log").open("ab")
        self._process = start(
            *command,
            stdout=self._log,
            stderr=self._log,
            env={**server_environment(), **environment},
            cwd=self.folder,
            start_new_session=True,
        )
        until(self._answers)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill the server's whole process group: an engine may outlive the server's main
        process."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        self._process.wait()

    def num_running(self) -> int:
        """Returns the number of running sequences that the server reports."""
        if self.name == "vllm":
            text = httpx2.get(f"{self.url}/metrics", timeout=60).text
            lines = [it for it in text.splitlines() if it.startswith("vllm:num_requests_")]
            of = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
            return sum(int(float(it.split()[-1])) for it in lines if it.startswith(of))
        if self.name == "sglang":
            (load,) = httpx2.get(f"{self.url}/v1/loads", timeout=60).json()["loads"]
            return int(load["num_running_reqs"] + load["num_waiting_reqs"])
        slots = httpx2.get(f"{self.url}/slots", timeout=60).json()
        return sum(slot["is_processing"] for slot in slots)

    def _answers(self) -> bool:
        assert not self.has_ended, (self.folder / f"{self.name}.log").read_text()[-3000:]
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()  # cheaper than a client
            return httpx2.get(f"{self.url}/health").status_code == 200
        except (OSError, httpx2.HTTPError):
            return False

    def _command(self) -> tuple[list[str], dict[str, str]]:
        peer = PEERS / _FOLDERS[self.name]
        if self.name == "vllm":
            libraries = [
                *(PEERS / "tcmalloc").rglob("libtcmalloc*.so.4"),
                *peer.rglob("libiomp5.so"),
            ]
            command = [
                *(str(peer / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve"),
                *(str(self.model), "--served-model-name", "m", "--enable-scale-out"),
                *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"),
                *("--max-model-len", str(self.length), "--max-num-seqs", str(self.slots)),
                "--enforce-eager",  # its compiler would take minutes of a small machine
                *("--structured-outputs-config", '{"backend": "guidance"}'),
                *self.arguments,
            ]
            environment = {
                "HOME": str(self.folder),
                "LD_PRELOAD": ":".join(str(it) for it in libraries[:2]),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # Beside other programs, the first step may take more than the 300 s of the default.
                "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",
                "OMP_NUM_THREADS": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": f"{server_environment()['PYTHONPATH']}:{PEERS / 'torchvision'}",
            }
            return command, environment
        if self.name == "sglang":
            command = [
                *(str(peer / "bin" / "python"), "-m", "sglang.launch_server", "--device", "cpu"),
                *("--model-path", str(self.model), "--served-model-name", "m"),
                *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"),
                # It keeps six tokens of a context free.
                *("--context-length", str(self.length + 6), "--grammar-backend", "llguidance"),
                *("--max-running-requests", str(self.slots), "--enable-metrics"),
                *("--max-total-tokens", str(self.slots * (self.length + 6))),
                *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
                "--disable-overlap-schedule",
                *self.arguments,
            ]
            environment = {
                "HOME": str(self.folder),
                "SGLANG_USE_CPU_ENGINE": "1",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            }
            return command, environment
        file = gguf_file(self.model, peer / "gguf-py", "F32", folder=self.folder)
        command = [
            *(str(peer / "bin" / "llama-server"), "--model", str(file), "--alias", "m"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--parallel", str(self.slots)),
            *("--ctx-size", str(self.slots * self.length), "--threads-http", "64", "--no-webui"),
            *("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"),
            *("--threads", "1", "--slots", "--metrics"),
            *self.arguments,
        ]
        return command, {}


@contextmanager
def real_server(name: str, folder: Path, **options: Any) -> Iterator[RealServer]:
    """Runs a server until the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    server = RealServer(name, folder, **options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


_LOCK = threading.Lock()
"""transformers cannot load a model in two threads: one of them would get random weights."""


@cache
def _loaded() -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(MODEL_DIR)


@cache
def _tokens(prompt: str, num_tokens: int) -> tuple[int, ...]:
    model, tokenizer = _loaded()
    return tuple(generate(model, tokenizer.encode(prompt), num_tokens))


def undisturbed(prompt: str, num_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """Returns the greedy tokens, with the end token if one comes, unless `ignore_eos` is True."""
    with _LOCK:
        ends = [] if ignore_eos else _loaded()[0].generation_config.eos_token_id
        tokens = [*_tokens(prompt, num_tokens)]
    for number, token_id in enumerate(tokens, 1):
        if token_id in ends:
            return tokens[:number]
    return tokens


def logprobs_of(prompt: str) -> list[list[float]]:
    """Returns the log-probabilities of all tokens at each position of the prompt after the
    first."""
    with _LOCK:
        model, tokenizer = _loaded()
    logits = model(tokenizer(prompt, return_tensors="pt").input_ids).logits[0, :-1]
    rows: list[list[float]] = logits.log_softmax(-1).tolist()
    return rows


def text_of(tokens: list[int]) -> str:
    """Returns the text of output tokens, without an end token."""
    text: str = _loaded()[1].decode(tokens, skip_special_tokens=True)
    return text
