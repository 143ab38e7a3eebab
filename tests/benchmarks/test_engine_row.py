"""The engine's row drives a real engine: every request gets its tokens, and arrives when due."""

from benchmarks.table.jobs import Request, Workload
from benchmarks.table.rows.engine import drive
from promptq.shared.settings.worker import read_worker_settings
from promptq.worker.serve.build import build


def test_a_request_arrives_when_due() -> None:
    engine = build(read_worker_settings(model="model-free", max_num_seqs=8)).engine
    others = [Request([5 + place] * 20, num_output=30) for place in range(3)]
    later = Request([9] * 40, num_output=4, at=0.2)
    outcome = drive(engine, Workload("arrivals", [*others, later]), first_id=1)
    assert [trace.num_tokens for trace in outcome.traces] == [30, 30, 30, 4]
    first, *_, last = outcome.traces
    assert last.events[0] > last.submitted >= first.submitted + 0.2
    assert outcome.counters["generation_tokens"] == 94
