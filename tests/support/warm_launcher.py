"""A launcher's fork server without its own import of torch, for launchers that are forked from a warm process."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, process, resource_tracker, util

_spawn = os.posix_spawn
_main_process = multiprocessing.current_process()  # of the warm process, which imports it first


def fork_server(path: str, words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Replace ``os.posix_spawn``, but fork if the program is a fork server."""
    if "forkserver" not in words:
        return _spawn(path, words, environ)
    pid = os.fork()
    if pid:
        return pid
    code: object = 1
    try:
        _be_as_after_exec()
        sys.argv[:] = words[2:]
        runpy.run_path(words[2], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        with suppress(Exception):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255 if isinstance(code, int) else 1)


def _be_as_after_exec() -> None:
    signal.set_wakeup_fd(-1)
    for number in (*range(1, 16), signal.SIGUSR1, signal.SIGCHLD):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2 and not os.get_inheritable(int(name)):
                os.close(int(name))
    # The launcher is a child of multiprocessing's fork server, and has its way to start children.
    multiprocessing.set_start_method(None, force=True)
    process._current_process = _main_process  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    forkserver._forkserver = forkserver.ForkServer()
    resource_tracker._resource_tracker = resource_tracker.ResourceTracker()
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
