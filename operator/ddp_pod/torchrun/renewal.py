"""What an interpreter draws or notes once at an import, drawn again for a process that was forked after the import.

Without it all ranks of a pod would have one seed: the same dropout masks, noise and shuffles on each, again after every
restart. ``random`` and the names of temporary files need no renewal: Python seeds them in each forked process.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final


def renew_imported_state() -> None:
    """Renew what the imported modules of this process share with the process from which it was forked."""
    for name, renew in _RENEWALS.items():
        module = sys.modules.get(name)
        if module is not None:
            renew(module)


def _seed_torch(torch: Any) -> None:
    # Not torch.seed(), which also seeds the generators of accelerators: they do not exist before a rank's first use.
    torch.default_generator.seed()


def _seed(module: Any) -> None:
    module.seed()


def _draw_key(process: Any) -> None:
    process.current_process().authkey = os.urandom(32)


def _forget_folder(tempfile: Any) -> None:
    tempfile.tempdir = None  # the script may set TMPDIR


def _restart_clock(logging: Any) -> None:
    """Let the times since the import, as in ``%(relativeCreated)d``, begin now; from Python 3.13 on in nanoseconds."""
    counts_nanoseconds = isinstance(getattr(logging, "_startTime", 0.0), int)
    logging._startTime = time.time_ns() if counts_nanoseconds else time.time()


def _note_thread(threading: Any) -> None:
    # After a fork Python renews only the other number of the thread.
    threading.main_thread()._native_id = threading.get_native_id()


_RENEWALS: Final[Mapping[str, Callable[[Any], None]]] = MappingProxyType(
    {
        "torch": _seed_torch,
        "numpy.random": _seed,
        "sympy.core.random": _seed,
        "multiprocessing.process": _draw_key,
        "tempfile": _forget_folder,
        "logging": _restart_clock,
        "threading": _note_thread,
    }
)
