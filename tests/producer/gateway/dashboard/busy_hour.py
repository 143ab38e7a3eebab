"""Statistics of an hour, for pages that show them."""

from __future__ import annotations

import math
import time
from typing import Any

from promptq.shared.protocol.worker_stats import SAMPLE_MS
from tests.producer.playing import KEYS


async def write_an_hour(connection: Any) -> None:
    """Statistics as a busy hour with a quiet while would have left them."""
    latest = int(time.time() * 1000) // SAMPLE_MS * SAMPLE_MS - SAMPLE_MS
    pipeline = connection.pipeline(transaction=False)
    for nth in range(719, -1, -1):
        wave = max(0.0, 1.2 + math.sin(nth / 60) + 0.3 * math.sin(nth / 7))
        fields: dict[str, Any] = {"waiting": 0, "running": 0, "tokens_per_second": 0}
        fields |= {f"{kind}_p{share}_ms": "" for kind in ("ttft", "queue") for share in (50, 95)}
        if not 300 < nth < 330:
            fields = {"waiting": round(9 * wave), "running": 8}
            fields |= {"tokens_per_second": round(230 + 40 * wave, 1)}
            fields |= {"ttft_p50_ms": round(40 + 30 * wave), "ttft_p95_ms": round(70 + 130 * wave)}
            fields |= {"queue_p50_ms": round(15 + 25 * wave), "queue_p95_ms": 30 + 120 * wave}
        pipeline.xadd(KEYS.statistics, fields, id=f"{latest - nth * SAMPLE_MS}-0")
    await pipeline.execute()
