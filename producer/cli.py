"""The console command, which says in one sentence whatever is wrong."""

from __future__ import annotations

import sys
from typing import NoReturn

from promptq.shared.errors import PromptqError
from promptq.shared.runtime.extras import require


def main() -> NoReturn:
    """Run the command that the arguments name; exit code 1 where something is wrong."""
    try:
        require("the command", "cli")
        from promptq.producer.commands.app import app

        app(prog_name="promptq")
    except PromptqError as error:
        print(f"promptq: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
