"""Explores every state of small queues, and walks at random through a larger one."""

from __future__ import annotations

import argparse
import time

from promptq.shared.server.embedded import EmbeddedServer
from tests.programs.states.explore import explore
from tests.programs.states.walks import walk
from tests.programs.states.worlds import LARGE, SMALL, WALKED
from tests.support.roles import drop_password

NUM_STEPS = 50


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests states", description=__doc__)
    parser.add_argument("--worlds", default="", help="only those whose name has this in it")
    parser.add_argument("--walks", type=int, default=2000, help="how many (2000)")
    options = parser.parse_args()
    with EmbeddedServer() as server:
        drop_password(server.url)
        print(f"{'states':>9} {'moves':>10} {'deepest':>8} {'seconds':>8}  world", flush=True)
        for name, world in (SMALL | LARGE).items():
            if options.worlds in name:
                seen = explore(world, server.port)
                print(
                    f"{seen.states:>9,} {seen.moves:>10,} {seen.deepest:>8} {seen.seconds:>8.1f}"
                    f"  {name}",
                    flush=True,
                )
        if options.walks:
            started = time.monotonic()
            walk(WALKED, server.port, options.walks, NUM_STEPS)
            seconds = time.monotonic() - started
            print(f"{options.walks} random walks of up to {NUM_STEPS} moves, {seconds:.1f} s")


if __name__ == "__main__":
    main()
