"""A worker's start: what is seen of it, and what is told of it later."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from promptq.shared.errors import ConfigurationError
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.api.messages import EngineSnapshot
from promptq.worker.engine.device.precision import has_fast_bf16_products
from promptq.worker.serve import worker
from promptq.worker.serve.build import build
from promptq.worker.serve.engine_thread import EngineThread
from promptq.worker.serve.process import _ready_line
from promptq.worker.serve.start_up import StartUp
from promptq.worker.shipped import MODEL_DIR
from tests.support.model_free import finished, running_worker
from tests.support.processes import Terminal, read_line
from tests.support.requests import async_put
from tests.support.roles import as_role
from tests.support.waiting import Clock
from tests.worker.engine.tiny_models import save_model


def test_each_stage_is_measured_until_the_next_begins() -> None:
    clock = Clock()
    start_up = StartUp(Console(file=io.StringIO()), clock)
    for stage, seconds in [("weights", 2.0), ("weights", 1.0), ("checking", 0.5)]:
        start_up(stage)
        clock.now += seconds
    start_up.close()
    assert start_up.seconds == {"weights": 3.0, "checking": 0.5}
    assert str(start_up) == "weights 3.0 s, checking 0.5 s"


@pytest.mark.usefixtures("logs_in_json")
def test_a_long_stage_is_logged_where_there_is_no_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    start_up = StartUp(Console(file=io.StringIO()), clock)
    start_up("weights")
    clock.now += 60.0
    start_up("checking")
    clock.now += 0.1
    start_up.close()
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["stage"], told["seconds"]) == ("weights", 60.0)
    assert str(start_up) == "checking 0.1 s", "nothing is repeated"


def test_building_the_shipped_model_goes_through_all_stages() -> None:
    heard: list[str] = []

    def progress(stage: str, share: float | None = None) -> None:
        heard.append(stage)

    build(WorkerSettings(max_num_seqs=2, device="cpu"), progress)
    assert heard == [
        "libraries",
        "weights",
        "native code",
        "checking",
        "KV cache",
        "packing",
        "warm-up",
        "tokenizer",
    ]


def test_a_terminal_shows_a_bar_and_the_ready_line_names_the_stages(redis_url: str) -> None:
    url = as_role("worker", redis_url)
    terminal = Terminal(
        *[sys.executable, "-m", "promptq.worker", "--redis", url, "--device", "cpu"],
        streams=["stderr"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        is_new=True,  # a fork has the libraries, and passes their stage too fast to be seen
    )
    # A terminal that nobody reads stops whoever writes to it.
    watching = threading.Thread(target=terminal.read_rest)
    watching.start()
    with terminal.process:
        ready = read_line(terminal.process)
        terminal.process.kill()
    watching.join()
    terminal.close()
    assert ready.startswith("ready after ")
    for stage in ("libraries", "weights", "checking", "KV cache"):
        assert f"{stage} " in ready
    assert ", native code, " in ready
    assert ", ends at <|endoftext|>, <|im_end|>; " in ready
    assert "libraries" in terminal.shown


def test_the_way_a_model_is_computed_is_said() -> None:
    settings = {"max_num_seqs": 2, "device": "cpu"}
    assert build(WorkerSettings(**settings)).method == "native code"
    turned_off = build(WorkerSettings(**settings, native=False))
    assert turned_off.method == "no native code (it is turned off)"
    assert "float16" in build(WorkerSettings(**settings, dtype="float16")).method


def test_recurrent_layers_and_their_memory_are_said(tmp_path: Path) -> None:
    save_model(tmp_path, "kimi_linear", vocab_size=2048, linear_head_dim=128)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, tmp_path)
    settings = WorkerSettings(model=str(tmp_path), max_num_seqs=4, device="cpu", native=False)
    served = build(settings)
    assert served.method == "no native code (it is turned off), no drafts (recurrent layers)"
    line = _ready_line(settings, served, "redis://localhost", 1.0, "")
    megabytes = served.engine.limits.state_bytes / 2**20
    assert f"MiB) and {megabytes:,.0f} MiB of recurrent states, " in line
    assert megabytes > 1


@pytest.mark.usefixtures("logs_in_json")
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_that_would_be_faster_in_fp32_says_so(
    dtype: Literal["float32", "bfloat16"], native: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    build(WorkerSettings(max_num_seqs=2, device="cpu", dtype=dtype, native=native))
    is_slow = dtype == "bfloat16" and not native and not has_fast_bf16_products()
    assert ("--dtype float32 is many times faster" in capsys.readouterr().err) == is_slow


def test_weights_that_do_not_fit_are_refused_beforehand(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(8 * 2**40)  # takes no room on the disk
    with pytest.raises(ConfigurationError, match=r"--model: .* 8,192\.0 GiB, and [\d.,]+ GiB"):
        build(WorkerSettings(model=str(tmp_path), device="cpu"))


async def test_the_first_heartbeat_may_take_longer_than_the_interval(
    redis_url: str, queue: AsyncRequestQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The regular heartbeats begin after the first one: both would read the same snapshot."""
    monkeypatch.setattr(worker, "INTERVAL_SECONDS", 0.001)
    snapshot = EngineThread.snapshot

    async def slow(engine: EngineThread) -> EngineSnapshot:
        await asyncio.sleep(0.02)
        return await snapshot(engine)

    monkeypatch.setattr(EngineThread, "snapshot", slow)
    async with running_worker(redis_url):
        result = await finished(queue, await async_put(queue, prompt="a", max_tokens=3))
    assert len(result["token_ids"]) == 3
