"""Report on request what a rank waits for: a collective operation, a coroutine, or a library's call.

PyTorch's flight recorder has the last operations of each process group in memory. Only the rank itself can read them,
while its main thread waits. So a thread does, which sleeps until the launcher writes to a pipe.
"""

import _thread
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from ..base.files import write_json
from .coroutines import find_awaited_frames
from .library_calls import describe_library_call, list_paths

_MOST_GROUPS = 8
_MOST_TENSORS = 4  # of an operation
_MOST_DIMENSIONS = 8
_REQUEST_BYTES = 64


def start_reporter(path: str) -> None:
    """Start the thread. ``path``: of the pipe; the report is beside it, with the suffix ``.json``. Raises: OSError."""
    os.mkfifo(path, 0o600)
    pipe = os.open(path, os.O_RDWR)  # no end of file when the launcher closes it
    # Not threading.Thread: threading.enumerate() returns the script's own threads only.
    _thread.start_new_thread(_report_on_request, (pipe, f"{path}.json"))


def _report_on_request(pipe: int, path: str) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # signals are for the script's threads
    while True:
        try:
            request = os.read(pipe, _REQUEST_BYTES).decode("ascii")
            write_json(path, {"request": request, "groups": _describe_groups(), **_describe_frames()})
        except Exception:  # a bug here must never reach the script
            return


def _describe_frames() -> dict[str, Any]:
    """Return file, line and function of the coroutines that are awaited, the library's call that waits, and paths."""
    awaited = find_awaited_frames()
    places = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in awaited]
    return {"awaited": places, "call": describe_library_call(awaited), "paths": list_paths(awaited)}


def _describe_groups() -> list[dict[str, Any]]:
    """Return each group's last operation and the first one that has not ended; the last used groups first."""
    last: dict[str, Any] = {}
    pending: dict[str, Any] = {}
    for entry in sorted(_read_entries(), key=lambda entry: int(entry["time_created_ns"])):
        group = str(entry["process_group"][0])
        last.pop(group, None)
        last[group] = entry
        if not entry["retired"]:
            pending.setdefault(group, entry)

    return [
        {"name": group, "last": _describe(last[group]), "pending": _describe(pending.get(group))}
        for group in list(reversed(last))[:_MOST_GROUPS]
    ]


def _read_entries() -> Iterator[dict[str, Any]]:
    """Yield the operations in the recorders of this PyTorch: NCCL has its own."""
    dump_all = getattr(sys.modules["torch._C._distributed_c10d"], "_dump_fr_trace_json", None)
    dump_nccl = getattr(sys.modules["torch._C._distributed_c10d"], "_dump_nccl_trace_json", None)
    for dump in (dump_all, dump_nccl):
        if dump is not None:
            yield from json.loads(dump()).get("entries", ())


def _describe(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    sizes = [list(size)[:_MOST_DIMENSIONS] for size in entry["input_sizes"]]
    return {
        "operation": str(entry["profiling_name"]).rpartition(":")[2],
        "sequence": int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]),
        "group": str(entry["process_group"][1]),
        "sizes": sizes[:_MOST_TENSORS],
    }
