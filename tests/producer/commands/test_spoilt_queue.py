"""Commands print a queue whose records strangers spoilt."""

from __future__ import annotations

import json

import pytest

from promptq.producer.commands.app import app
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import scripts
from tests.producer.playing import KEYS, HandWorker
from tests.support.requests import put
from tests.support.roles import as_role
from tests.support.spoilt import SPOILT, spoil_queue

COMMANDS = (
    *(["top", "--once"], ["stats"], ["stats", "--json"], ["models", "list"], ["scaling"]),
    *(["dead", "list"], ["dead", "list", "--json"], ["keys", "list"], ["keys", "list", "--json"]),
    *(["webhooks", "dead"], ["webhooks", "dead", "--json"]),
)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", SPOILT)
def test_each_command_prints_what_is_well(
    redis_url: str,
    own_worker: HandWorker,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And nothing of its output is part of the log, or is no JSON."""
    monkeypatch.setenv("PROMPTQ_REDIS_URL", as_role("", redis_url))
    server = own_worker.redis
    spoil_queue(server, own_worker.queue, SPOILT[kind])
    put(own_worker.queue, "waits")
    own_worker.queue.run(scripts.heartbeat(WorkerStats(worker_id="well"), 60_000, []))
    dead = {"request_id": "well", "tenant": "", "attempts": 1, "reason": "gone"}
    server.xadd(KEYS.webhooks_dead, dead)
    server.xadd(KEYS.webhooks_dead, dict.fromkeys(dead, SPOILT[kind]))
    for command in COMMANDS:
        app(command, standalone_mode=False)
        printed = capsys.readouterr().out
        assert "well" in printed or command[0] in ("models", "scaling"), (command, printed)
        assert "spoilt record" not in printed
        if command[-1] == "--json":
            json.loads(printed, parse_constant=pytest.fail)
