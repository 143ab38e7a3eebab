"""The console command, which says in one sentence whatever is wrong."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

from promptq.shared.errors import PromptqError
from promptq.shared.runtime.extras import require
from promptq.shared.runtime.printable import printable


def main() -> NoReturn:
    """Run the command that the arguments name; exit code 1 where something is wrong."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # whose encoding may lack what a text has
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        require("the command", "cli")
        from promptq.producer.commands.app import app

        app(prog_name="promptq")
    except PromptqError as error:
        said = printable(str(error), keep="\n\t")  # it may repeat what a stranger wrote
        print(f"promptq: {said}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
