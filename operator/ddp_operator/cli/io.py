"""What commands are given: files, numbers."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ddp_operator.cli.errors import CommandError


def read_file(name: str, what: str = "a job's YAML") -> str:
    """Return the text of a file, or of standard input for ``-``. Raises: CommandError."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}; give the path of {what}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{name}: not UTF-8 text; give the path of {what}") from None


def integer(least: int, most: int | None = None, *, hint: str = "") -> Callable[[str], int]:
    """Return an argparse type for whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() else least - 1
        if least <= number <= (most or number):
            return number
        bounds = f"at least {least}" if most is None else f"between {least} and {most}"
        raise argparse.ArgumentTypeError(f"{text!r}: must be {bounds}" + (f"; {hint}" if hint else ""))

    return parse
