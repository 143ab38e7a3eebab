"""Runs the command in command.py as `python -m promptq.worker`."""

from __future__ import annotations

import sys

from promptq.shared.errors import PromptqError
from promptq.shared.runtime.extras import require_one_of
from promptq.shared.runtime.printable import printable
from promptq.shared.runtime.quick_imports import quick_imports


def main() -> None:
    """Run the command. Prints a PromptqError without a traceback, and then exits with status 1."""
    try:
        require_one_of("a worker", "worker", "upstream")
        with quick_imports():
            from promptq.worker.command import command

        command()(prog_name="promptq worker")
    except PromptqError as error:
        said = printable(str(error), keep="\n\t")  # the text may come from a client
        sys.exit(f"promptq worker: {said}")


if __name__ == "__main__":
    main()
