"""The console command. It prints each error as one sentence."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

from promptq.shared.errors import PromptqError
from promptq.shared.runtime.extras import require
from promptq.shared.runtime.printable import printable


def main() -> NoReturn:
    """Runs the command that the arguments name. The exit code is 1 after an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack some characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        require("the command", "cli")
        from promptq.producer.commands.app import app

        app(prog_name="promptq")
    except PromptqError as error:
        message = printable(str(error), keep="\n\t")  # the message may quote untrusted text
        print(f"promptq: {message}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
