"""Traces of the simulation and of real servers are replayed. An altered trace is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from promptq.shared.protocol.claims import Held, Room
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import NewRequest, Request
from promptq.shared.protocol.rows import Row, RowStatus
from promptq.shared.queue import request_queue
from promptq.shared.queue.request_queue import RequestQueue
from tests.programs.simulation.plan import Plan
from tests.programs.simulation.server import compile_library
from tests.programs.states import explore
from tests.programs.states.mutants import CHAOS_MUTANTS, MUTANTS
from tests.programs.traces.alterations import (
    ALTERATIONS,
    Entries,
    change_a_reply,
    skip_the_fence,
)
from tests.programs.traces.append_only import SERVER_SETTINGS, recorded_text, write_trace
from tests.programs.traces.replay import RefusedError, Replayed, replay, run_replay
from tests.programs.traces.trace_file import (
    FORMAT,
    Entry,
    Trace,
    TraceError,
    read_trace,
    scripts_digest,
)
from tests.support.processes import run
from tests.support.servers import PROGRAMS, OwnServer

LEASE_MS = 1000
FIRST_SEED, MOST_SEEDS = 41, 50


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("preload"))


@pytest.fixture(scope="module")
def recorded_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the file with a trace of a small world in which every alteration is possible."""
    path = tmp_path_factory.mktemp("recorded") / "trace"
    for seed in range(FIRST_SEED, FIRST_SEED + MOST_SEEDS):
        plan = Plan.of(seed)
        # Replays know how far `shortest_first_ms` moves a request, but not when a log expires.
        if not plan.shortest_first_ms or plan.log_ttl_ms < LEASE_MS:
            continue
        options = ["--seeds", "1", "--seed", str(seed), "--most-requests", "8", "--record", path]
        ended = run(sys.executable, "-m", "tests.programs.simulation", *options)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        if can_be_altered(read_trace(path)):
            break
    return path


def can_be_altered(trace: Trace) -> bool:
    try:
        return all(alter([*trace.entries]) for alter in ALTERATIONS)
    except (StopIteration, ValueError):  # no request has two attempts, for example
        return False


@pytest.fixture(scope="module")
def recorded(recorded_file: Path) -> Trace:
    return read_trace(recorded_file)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_world_is_replayed_on_each_server(recorded: Trace, library: Path, kind: str) -> None:
    num_calls = len(recorded.entries)
    num_of_no_queue = sum(
        entry.args[:2] == ("SADD", "promptq:queues") for entry in recorded.entries
    )
    assert num_calls - num_of_no_queue > 100
    replayed = replay(recorded, library, kind)
    assert replayed.num_calls == replayed.num_checked == num_calls - num_of_no_queue


@pytest.mark.parametrize("alter", ALTERATIONS, ids=lambda alter: alter.__name__)
def test_an_altered_trace_is_refused(recorded: Trace, library: Path, alter: Any) -> None:
    entries: Entries = alter([*recorded.entries])
    assert entries != recorded.entries
    first = next(
        number
        for number, (old, new) in enumerate(zip(recorded.entries, entries, strict=False), 1)
        if old != new
    )
    with pytest.raises(RefusedError) as refused:
        replay(replace(recorded, entries=entries), library)
    print(refused.value)
    number = int(str(refused.value).split(",")[0].removeprefix("call "))
    assert first <= number <= first + 100, "a changed token shows when its request ends"


def test_a_server_that_skips_the_fence_is_found_by_invariants(
    recorded: Trace, library: Path
) -> None:
    """The replies of the trace and of the server are equally wrong."""
    altered = replace(recorded, entries=skip_the_fence([*recorded.entries]))
    with pytest.raises(RefusedError, match="who_lost_a_request_learns_it"):
        replay(altered, library, texts=CHAOS_MUTANTS["lost-fence"].texts())


def test_a_broken_script_with_right_replies_is_found(recorded: Trace, library: Path) -> None:
    """A key without the queue's prefix changes no reply."""
    mutant = next(each for each in MUTANTS if each.breaks == "keys_bear_the_queues_name")
    with pytest.raises(RefusedError, match="keys_bear_the_queues_name"):
        replay(recorded, library, texts=mutant.texts())


def test_a_real_server_is_recorded_across_its_death(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "script_text", recorded_text)
    folder = tmp_path / "server"
    with OwnServer(folder, *SERVER_SETTINGS) as server, redis.Redis(port=server.port) as client:
        queue = RequestQueue(client, "volume", lease_ms=LEASE_MS)
        keys = queue.keys
        queue.enqueue([NewRequest("r1", Request.build({"prompt": "a", "max_tokens": 3}))])
        with client.pipeline(transaction=True) as plain:
            plain.hset(keys.request("r2"), "payload", '{"prompt":"\\u00e9","max_tokens":1}')
            plain.zadd(keys.pending, {"r2": 1})
            plain.execute()
        first = queue.take_batch(Room(1, 1000))[0]
        server.kill()
        server.start()
        second = queue.take_batch(Room(1, 1000))[0]
        assert {first.request_id, second.request_id} == {"r1", "r2"}
        fence = {claim.request_id: claim.fence for claim in (first, second)}["r1"]
        event, stale = (
            TokenEvent(index=0, token_ids=[token_id], text="b", attempt=1) for token_id in (7, 8)
        )
        rows = [Row.of("r1", fence, event), Row.of("r1", "0-stale", stale)]
        assert queue.publish(rows, [Held("r1", fence)]).rows == [RowStatus.OK, RowStatus.FENCED]
        queue.cancel("r1")
        with pytest.raises(redis.ResponseError):  # an error is a reply, too
            client.eval(recorded_text("claim"), 1, keys.pending, "promptq:named")
        queue.reap()
        server.kill()
    path = tmp_path / "trace"
    write_trace(folder, path, "a test", LEASE_MS)
    trace = read_trace(path)
    names = [entry.script or entry.args[0].upper() for entry in trace.entries]
    expected = ["enqueue", "HSET", "ZADD", "claim", "claim", "publish", "cancel", "claim", "reap"]
    assert names == expected
    assert [entry.goes_on for entry in trace.entries] == [name == "HSET" for name in names]
    assert trace.entries[5].reply == [["ok", "fenced"], ["ok"]]
    assert "error" in trace.entries[7].reply
    assert replay(replace(trace, entries=trace.entries[:7]), library) == Replayed(7, 5, 6)
    with pytest.raises(RefusedError, match="the script fails: ERR"):
        replay(trace, library)
    missing = replace(trace, entries=[*trace.entries[:3], *trace.entries[4:]])
    with pytest.raises(RefusedError, match="call 4, claim"):
        replay(missing, library)


def test_a_call_that_nobody_sends_is_refused(recorded: Trace, library: Path) -> None:
    first = next(entry for entry in recorded.entries if entry.script)
    args = ("1000", "0", "r", "no fence", "")
    strange = Entry(first.at_us, "publish", first.keys, args, [[], ["fenced"]])
    with pytest.raises(RefusedError, match=r"call 1, publish, .*no worker or client sends"):
        replay(replace(recorded, entries=[strange, *recorded.entries]), library)


HEADER = {"format": FORMAT, "source": "a test", "lease_ms": 1000, "scripts": scripts_digest()}
CALL = '{"at": 1, "command": ["DEL", "a"]}\n'
END = '{"calls": 1}\n'
BAD_FILES = {
    "is no trace: it is empty.": "",
    "is no trace: line 1 is no JSON object.": "[" * 100_000,
    "is no trace: its format is 'promptq trace 0', not 'promptq trace 1'.": (
        json.dumps({**HEADER, "format": "promptq trace 0"}) + "\n" + CALL + END
    ),
    "is from another version of the scripts; record it with this version.": (
        json.dumps({**HEADER, "scripts": "0"}) + "\n" + CALL + END
    ),
    "is no trace: its header has no lease_ms.": (
        json.dumps({**HEADER, "lease_ms": "1"}) + "\n" + CALL + END
    ),
    "is cut off: its last line does not count the calls.": json.dumps(HEADER) + "\n" + CALL[:20],
    "has 2 calls, but counts 1.": json.dumps(HEADER) + "\n" + CALL + CALL + END,
    "line 2 is no call: 'command' is missing.": json.dumps(HEADER) + '\n{"at": 1}\n' + END,
    "line 2 is no call: 'reply' is missing.": (
        json.dumps(HEADER) + '\n{"at": 1, "script": "reap", "keys": [], "args": []}\n' + END
    ),
    "line 2 is no call: there is no script 'a'.": (
        json.dumps(HEADER) + '\n{"at": 1, "script": "a"}\n' + END
    ),
    "line 2 is no call: the time -1 is no number of microseconds.": (
        json.dumps(HEADER) + "\n" + CALL.replace("1", "-1") + END
    ),
    "line 2 is no call: its words are not texts.": (
        json.dumps(HEADER) + "\n" + CALL.replace('"a"', "1") + END
    ),
}


@pytest.mark.parametrize("sentence", BAD_FILES)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, sentence: str) -> None:
    path = tmp_path / "trace"
    path.write_text(BAD_FILES[sentence])
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert str(refused.value).startswith(str(path))
    assert str(refused.value).endswith(sentence)
    path.write_bytes(b"\xff")
    with pytest.raises(TraceError, match="is not text in UTF-8"):
        read_trace(path)


def test_the_explorer_names_its_problem_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nothing"
    monkeypatch.setattr(sys, "argv", ["states", "--replay", str(path)])
    assert explore.main() == 2
    assert capsys.readouterr() == ("", f"{path} cannot be read: No such file or directory.\n")
    for words, problem in (
        (["--worlds", "no world"], "--worlds: no world has 'no world' in its name"),
        (["--every", "0"], "--every: 0 is below 1"),
        (["--walks", "-1"], "--walks: -1 is below 0"),
    ):
        monkeypatch.setattr(sys, "argv", ["states", *words])
        with pytest.raises(SystemExit) as ended:
            explore.main()
        assert ended.value.code == 2
        assert capsys.readouterr().err.endswith(f"{problem}\n")


def test_the_explorer_prints_what_came_of_a_replay(
    recorded_file: Path, recorded: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_replay(recorded_file, PROGRAMS[0], every=100) == 0
    assert capsys.readouterr().out.startswith("simulation, seed ")
    altered = tmp_path / "altered"
    replace(recorded, entries=change_a_reply([*recorded.entries])).write(altered)
    assert run_replay(altered, PROGRAMS[0], every=100) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith(f"{altered} is refused at call ")
    assert "the server replies [['ok']" in printed.out
