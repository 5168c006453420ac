"""Input of commands (files, numbers), their exit codes, and the error that ends a command."""

import argparse
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from ddp_cli.client.errors import ApiError, ClientError, Conflict, NotFound, TrainingFailed
from ddp_cli.view.terminal import print_text
from ddp_pod.contract.numbers import parse_count


class ExitCode(IntEnum):
    """Exit codes that scripts may rely on; docs/cli.md explains each."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    NOT_FOUND = 3
    CLUSTER = 4
    BROKEN = 70
    INTERRUPTED = 130


class CommandError(ClientError):
    """Ends a command. The text states the problem and the remedy."""

    def __init__(self, message: str, code: ExitCode = ExitCode.BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code


def exit_code(error: ClientError) -> ExitCode:
    """Return the exit code for an error."""
    if isinstance(error, CommandError):
        return error.code
    if isinstance(error, NotFound):
        return ExitCode.NOT_FOUND
    if isinstance(error, ApiError):
        return ExitCode.NOT_FOUND if error.status == 404 else ExitCode.CLUSTER
    return ExitCode.FAILED if isinstance(error, Conflict | TrainingFailed) else ExitCode.BAD_INPUT


def read_file(name: str, kind: str = "a job's YAML") -> str:
    """Return the text of a file, or of standard input for ``-``. Raises: CommandError."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}; name the path of {kind}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{name}: not UTF-8 text; name the path of {kind}") from None


def print_note(text: str) -> None:
    """Print a remark to stderr, beside the command's result."""
    print_text(text, file=sys.stderr)


def integer(least: int, most: int | None = None, *, hint: str = "") -> Callable[[str], int]:
    """Return an argparse type for whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        number = parse_count(text)
        if number is not None and least <= number <= (most or number):
            return number
        bounds = f"of at least {least}" if most is None else f"between {least} and {most}"
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number {bounds}" + (f"; {hint}" if hint else ""))

    return parse
