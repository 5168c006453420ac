"""The exception that ends a Python process which a rank's program has started, as ``bash train.sh`` does.

The launcher reads it instead of the text in the output, which shows less, if the program then ends with the same code.
"""

import os
import sys
from types import TracebackType
from typing import Any

from ..base.files import read_json
from ..base.runtime_files import CHILD_ERROR


def record_uncaught(runtime: str, local_rank: int) -> None:
    """Have the interpreter record the exception that ends this process before it prints it."""
    hook = sys.excepthook
    path = os.path.join(runtime, "output", f"{local_rank}.{CHILD_ERROR}")
    worker = os.path.join(runtime, "workers", f"{local_rank}.json")

    def record(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        try:
            _record(value, path, read_json(worker))
        except Exception:  # a bug here must never reach the program
            pass
        hook(kind, value, trace)

    sys.excepthook = record


def _record(error: BaseException, path: str, about: Any) -> None:
    from .tracebacks import record_exception

    try:
        os.unlink(path)  # of a former process, which the program has outlived
    except FileNotFoundError:
        pass
    record_exception(error, path, about, ends=False)  # a program may call the hook for an exception that it handles
