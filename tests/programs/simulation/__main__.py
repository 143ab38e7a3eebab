"""Runs real workers and clients with time, network and faults from a seed."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.programs.simulation import clock


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of worlds (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="first seed (%(default)s)")
    parser.add_argument("--calm", action="store_true", help="without faults")
    parser.add_argument("--trace", action="store_true", help="print each world's story")
    parser.add_argument("--hashes", action="store_true", help="print the hash of each world")
    return parser.parse_args()


def main() -> int:
    """Run the worlds. Returns 1 after a violation."""
    arguments = _arguments()
    clock.install()  # before the modules of promptq are imported
    import structlog

    from tests.programs.simulation.server import compile_preload
    from tests.programs.simulation.world import Plan, run_world

    logging.disable()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    gc.collect()
    gc.freeze()
    totals: Counter[str] = Counter()
    num_failed = 0
    started, cpu_started = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        library = compile_preload(Path(folder))
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            plan = Plan.of(seed)
            if arguments.calm:
                plan = plan.without_faults()
            result = run_world(plan, library, sys.stdout if arguments.trace else None)
            totals["requests"] += result.num_requests
            totals["commands"] += result.num_commands
            totals["callbacks"] += result.num_callbacks
            totals["streams carried on"] += result.num_carried_on
            totals["virtual milliseconds"] += int(result.virtual_seconds * 1000)
            totals.update({f"fault: {kind}": count for kind, count in result.faults.items()})
            if arguments.hashes:
                print(seed, result.digest, flush=True)
            if result.violations:
                num_failed += 1
                print(f"seed {seed}: {len(result.violations)} violations")
                for violation in result.violations[:10]:
                    print(f"  {violation}", flush=True)
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    for name, count in totals.items():
        print(f"{count:12,}  {name}")
    rate = totals["requests"] / seconds * 3600
    print(f"{seconds:.1f} s, of which {cpu_seconds:.1f} s CPU here; {rate:,.0f} requests an hour")
    print(f"{num_failed} of {arguments.seeds} worlds failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
