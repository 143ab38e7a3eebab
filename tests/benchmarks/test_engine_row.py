"""The engine's row drives a real engine: every request gets its tokens, and arrives when due."""

from benchmarks.table.jobs import Request, Workload
from benchmarks.table.rows.engine import drive
from promptq.shared.settings.worker import read_worker_settings
from promptq.worker.serve.build import build


def test_a_guest_arrives_once_the_others_are_under_way() -> None:
    engine = build(read_worker_settings(model="model-free", max_num_seqs=8)).engine
    others = [Request([5 + place] * 20, num_output=30) for place in range(3)]
    guest = Request([9] * 40, num_output=4, after=10)
    outcome = drive(engine, Workload("guests", [*others, guest]), first_id=1)
    assert [trace.num_tokens for trace in outcome.traces] == [30, 30, 30, 4]
    assert outcome.traces[-1].submitted >= max(trace.events[9] for trace in outcome.traces[:-1])
    assert outcome.counters["generation_tokens"] == 94


def test_a_loose_limit_ends_where_it_is_due() -> None:
    settings = read_worker_settings(max_num_seqs=8, max_model_len=512)  # the shipped model
    engine = build(settings).engine
    requests = [Request([7] * 12, num_output=20, limit=200, end_token=3), Request([8] * 12, 33)]
    outcome = drive(engine, Workload("limits", requests), first_id=1)
    assert [trace.num_tokens for trace in outcome.traces] == [20, 33]
