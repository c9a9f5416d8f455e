"""The end of a program that only prints: its errors are sentences."""
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from reference.errors import UserError


def run(main: Callable[[], object]) -> None:
    """Run `main`. A UserError, or output that cannot be printed, ends it with a sentence and status 2."""
    try:
        if sys.stdout is None:      # Python found it closed
            raise UserError("Standard output is closed, and there is nothing else that this program does but print.")
        try:
            main()
        finally:
            sys.stdout.flush()      # now, while a failure can still be told
    except UserError as error:
        end(f"error: {error}\n")
    except OSError as error:        # of the output, since there are no files
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # for what Python still has to print
        left = isinstance(error, BrokenPipeError)       # its reader, as `head` does
        end("" if left else f"error: The output cannot be printed: {error.strerror}. Send it where there is room.\n")


def end(words: str) -> NoReturn:
    """End with these words and status 2."""
    if sys.stderr:
        sys.stderr.write(words)
    sys.exit(2)
