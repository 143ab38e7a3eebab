"""Runs other people's programs against a gateway, and writes docs/compatibility.md.

Arguments such as `openai litellm` choose programs. Each program has a fixed version, a separate
environment, an empty home, and no network but loopback. The folder tests/programs/compat/results
lists each attempt. The exit code is 1 if an attempt fails that passes in the committed results.
With `--engine`, the worker forwards requests to a real server, which `python -m benchmarks peers`
builds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.programs.compat import page
from tests.programs.compat.catalogue import PROGRAMS
from tests.programs.compat.environments import build, build_promptq, leave_network
from tests.programs.compat.running import run, served


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests compat", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--engine", choices=page.ENGINES, default=page.NATIVE)
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of building one")
    options = parser.parse_args()
    names: list[str] = options.names or [*PROGRAMS]
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"{', '.join(unknown)}: the programs are {', '.join(PROGRAMS)}")
    programs = [program for name, program in PROGRAMS.items() if name in names]
    # This needs package registries, so it comes before the network is removed.
    python = build_promptq(options.wheel.resolve() if options.wheel else None)
    failures = {program.name: build(program) for program in programs}
    leave_network()
    passed_before, lost, results = page.committed(options.engine), [], {}
    with (
        tempfile.TemporaryDirectory(prefix="compat-") as name,
        served(python, Path(name), options.engine) as gateway,
    ):
        for program in programs:
            if why := failures[program.name]:
                attempts, exchanges = [page.Attempt("install", False, "", why)], []
            else:
                attempts, exchanges = run(program, gateway, Path(name))
            results[program.name] = page.result_of(program, attempts, exchanges)
            for each in attempts:
                outcome = each.got if each.passed else each.why
                mark = "passes" if each.passed else "FAILS"
                print(f"{program.name:14} {each.tried:34} {mark:7} {outcome[:160]}", flush=True)
            gone = passed_before.get(program.name, set()) - {*results[program.name].passes}
            lost += [f"{program.name}: {tried}" for tried in gone]
    page.write(results, options.engine)
    for each in sorted(lost):
        print(f"passed according to the committed results, and fails now: {each}", file=sys.stderr)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
