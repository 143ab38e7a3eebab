"""`python -m promptq.worker`; what it does stands in command.py."""

from __future__ import annotations

import sys

from promptq.shared.errors import PromptqError
from promptq.shared.runtime.extras import require


def main() -> None:
    """Run the command; whatever is wrong is said in one sentence."""
    try:
        require("a worker", "worker")
        from promptq.worker.command import command

        command()(prog_name="promptq worker")
    except PromptqError as error:
        sys.exit(f"promptq worker: {error}")


if __name__ == "__main__":
    main()
