"""The console command. It prints each error as one sentence."""

from __future__ import annotations

import gc
import io
import sys
from typing import NoReturn

from promptq.shared.errors import PromptqError
from promptq.shared.runtime.printable import printable


def main() -> NoReturn:
    """Runs the command that the arguments name. The exit code is 1 after an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack some characters
        sys.stdout.reconfigure(errors="backslashreplace")
    gc.disable()  # until the command is loaded, see `quick_imports`
    try:
        try:
            from promptq.producer.commands.app import app

            app(prog_name="promptq")
        except ImportError:
            from promptq.shared.runtime.extras import require

            require("the command", "cli")
            raise
    except PromptqError as error:
        message = printable(str(error), keep="\n\t")  # the message may quote untrusted text
        print(f"promptq: {message}", file=sys.stderr)
        sys.exit(1)
    finally:
        gc.freeze()  # the last collection need not search what the end of the process frees
    sys.exit(0)


if __name__ == "__main__":
    main()
