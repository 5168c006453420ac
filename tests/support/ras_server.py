"""A stand-in for the RAS thread of NCCL, with protocol and JSON of src/ras/client_support.cc of NCCL 2.28 to 2.30."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
RUNNING = {
    "init_state": 0,
    "async_error": 0,
    "finalize_called": False,
    "destroy_flag": False,
    "abort_flag": False,
}
SILENT = {"unresponsive": True, "considered_dead": False}


def rank(number: int, pid: int, **counts: int) -> dict[str, Any]:
    """Return a rank with the numbers of operations that it has launched."""
    status = {"status": RUNNING, "collective_counts": {name: counts.get(name, 0) for name in OPERATIONS}}
    return {"rank": number, "host": "10.0.0.1", "pid": pid, "cuda_dev": 0, "nvml_dev": 0, **status}


def render_report(*communicators: tuple[int, Sequence[Any], Mapping[int, int]], has_comma: bool = True) -> str:
    """Return a report.

    ``communicators``: size, ranks, and the process ids of missing ranks; ``has_comma``: not so in NCCL 2.28.
    """
    listed = [
        {
            "hash": "0xae94423cfbb2ef4a",
            "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
            "size": size,
            "ranks_count": len(ranks),
            "missing_ranks_count": len(missing),
            "ranks": ranks,
            "missing_ranks": [
                {"rank": number, "host": "10.0.0.2", "pid": pid, "cuda_dev": 0, "nvml_dev": 0, "status": SILENT}
                for number, pid in missing.items()
            ],
        }
        for size, ranks, missing in communicators
    ]
    versions = {"nccl_version": "2.29.7", "cuda_runtime_version": 13000, "cuda_driver_version": 13000}
    counts = {"timestamp": "2026-11-28 13:06:53", "communicators_count": len(listed), "communicators": listed}
    end = {"ras": {"collection_time_sec": 0.0, "timeouts_count": 0}}
    text = json.dumps({**versions, **counts, **end}, indent=2)
    return text if has_comma else re.sub(r'("nvml_dev": 0),(\n +"status": {\n +"unresponsive")', r"\1\2", text)


class RasServer:
    """Answers commands on a port. ``silent``: connections that a stopped process accepts first."""

    def __init__(self, report: Callable[[], str], *, port: int = 0, silent: int = 0, has_json: bool = True) -> None:
        self._report = report
        self._silent = silent
        self._has_json = has_json
        self._listener = socket.create_server(("127.0.0.1", port))
        self._kept: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if len(self._kept) < self._silent:
                self._kept.append(connection)
                continue
            with connection, connection.makefile("r") as commands:
                for command in commands:
                    reply = self._answer(command.strip().lower())
                    connection.sendall(reply.encode())
                    if command.strip().lower() == "status":
                        break

    def _answer(self, command: str) -> str:
        if command == "status":
            return self._report()
        if command.startswith("timeout ") or (command == "set format json" and self._has_json):
            return "OK\n"
        return f"ERROR: Unknown command {command}\n"

    def close(self) -> None:
        for item in (self._listener, *self._kept):
            item.close()
