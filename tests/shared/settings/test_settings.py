"""Settings come from the environment under one prefix."""

from __future__ import annotations

import pytest

from promptq.shared.errors import ConfigurationError
from promptq.shared.settings.common import Settings, flag_of, read_settings


def test_the_environment_is_read_and_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTQ_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("PROMPTQ_QUEUE", "jobs")
    settings = read_settings(queue="others")
    assert (settings.max_num_seqs, settings.queue) == (7, "others")


def test_what_is_wrong_is_named_as_flag_and_as_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTQ_LEASE_MS", "soon")
    with pytest.raises(ConfigurationError, match=r"--lease-ms \(PROMPTQ_LEASE_MS\): .*'soon'"):
        read_settings()


def test_the_flags_bear_vllms_names() -> None:
    flags = {flag_of(name) for name in Settings.model_fields}
    assert flags >= {
        "--model", "--redis", "--queue", "--device", "--dtype", "--max-num-seqs",
        "--max-num-batched-tokens", "--max-model-len", "--kv-cache-memory", "--seed",
    }  # fmt: skip
