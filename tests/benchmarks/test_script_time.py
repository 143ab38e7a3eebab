"""The benchmark of the scripts fills a queue and measures each script, at every depth."""

from __future__ import annotations

from benchmarks.queue.script_time import table


def test_the_table_has_each_script_at_each_depth() -> None:
    head, line, *rows = table([40, 30], calls=2)
    assert head == "| script | 30 waiting | 40 waiting |"
    assert line == "| --- | ---: | ---: |"
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [script.split(" of ")[0] for script, *_ in cells] == [
        *("enqueue", "claim", "publish", "publish", "place", "quote", "priorities"),
        *("statistics", "sweep", "reap", "heartbeat", "has_work"),
    ]
    assert all(int(cell.replace(",", "")) >= 0 for _, *numbers in cells for cell in numbers)
