"""Settings come from the environment under one prefix, by process."""

from __future__ import annotations

import pytest

from promptq.shared.errors import ConfigurationError
from promptq.shared.settings.common import flag_of, read_settings
from promptq.shared.settings.worker import WorkerSettings, read_worker_settings


def test_the_environment_is_read_and_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTQ_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("PROMPTQ_QUEUE", "jobs")
    settings = read_worker_settings(queue="others")
    assert (settings.max_num_seqs, settings.queue) == (7, "others")


def test_what_is_wrong_is_named_as_flag_and_as_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTQ_LOG_LEVEL", "loud")
    said = r"--log-level \(PROMPTQ_LOG_LEVEL\): .*'loud'"
    for read in (read_settings, read_worker_settings):
        with pytest.raises(ConfigurationError, match=said):
            read()


def test_the_flags_bear_vllms_names() -> None:
    flags = {flag_of(name) for name in WorkerSettings.model_fields}
    assert flags >= {
        "--model", "--redis", "--queue", "--device", "--dtype", "--max-num-seqs",
        "--max-num-batched-tokens", "--max-model-len", "--kv-cache-memory", "--seed",
    }  # fmt: skip
