"""Reads the file that a command was given."""

from __future__ import annotations

import sys
from pathlib import Path

from ddp_operator.cli.errors import CommandError


def read_file(name: str, what: str = "a job's YAML") -> str:
    """Return the text of a file, or of standard input for ``-``. Raises: CommandError."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}; give the path of {what}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{name}: is not UTF-8 text; give the path of {what}") from None
