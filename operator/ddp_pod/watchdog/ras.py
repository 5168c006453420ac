"""What NCCL's own RAS threads state about a hang, since NCCL 2.28.7: a second opinion, which decides nothing.

The report may come from a process of another job if pods use the network of their node, and it is of the user's
process. ADR 0043 has the reasons.
"""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..contract.report import RAS_LIMIT

_REQUEST = b"SET FORMAT json\nTIMEOUT 3\nSTATUS\n"
_TRIES = 3
_SECONDS_TO_ANSWER = 1.0
_SECONDS_TO_COLLECT = 8.0
_MOST_BYTES = 2 << 20  # 650 for each rank of each communicator
_MISSING_COMMA = re.compile(r'("nvml_dev": \d+)\n')  # of NCCL 2.28
_MOST_NAMED = 4


class RasQuery:
    """A query in a thread. ``finding``: which ranks are missing or behind; empty: none, or not known yet."""

    def __init__(self, pids: Collection[int], world_size: int) -> None:
        self.finding = ""
        threading.Thread(target=self._run, args=(pids, world_size), daemon=True).start()

    def _run(self, pids: Collection[int], world_size: int) -> None:
        with suppress(Exception):  # no RAS, or a report of any content
            host, _, port = os.environ.get("NCCL_RAS_ADDR", "localhost:28028").rpartition(":")
            report = read_report(host.strip("[]"), int(port))
            self.finding = describe_report(report, pids, world_size)


def read_report(host: str, port: int) -> dict[str, Any]:
    """Return the report of one of the pod's RAS threads. Raises: OSError, ValueError.

    All of them listen on one port and the kernel chooses. A stopped process accepts the connection and never answers.
    """
    for _ in range(_TRIES):
        with suppress(TimeoutError), socket.create_connection((host, port), _SECONDS_TO_ANSWER) as connection:
            connection.sendall(_REQUEST)
            received = bytearray(connection.recv(4096))
            connection.settimeout(_SECONDS_TO_COLLECT)
            deadline = time.monotonic() + _SECONDS_TO_COLLECT
            while chunk := connection.recv(1 << 16):
                received += chunk
                if len(received) > _MOST_BYTES or time.monotonic() > deadline:
                    raise ValueError("the report is too long")
            text = received.removeprefix(b"OK\nOK\n").decode()
            return dict(json.loads(_MISSING_COMMA.sub(r"\1,\n", text)))
    raise TimeoutError


def describe_report(report: Mapping[str, Any], pids: Collection[int], world_size: int) -> str:
    """Return which ranks are missing or behind; empty for a report without a process of this pod.

    Raises: KeyError, TypeError, ValueError.
    """
    communicators = sorted(report["communicators"], key=lambda item: -int(item["size"]))
    known = {entry["pid"] for item in communicators for entry in (*item["ranks"], *item["missing_ranks"])}
    if known.isdisjoint(pids):
        return ""
    findings = (_describe_communicator(item, world_size) for item in communicators)
    return "; ".join([finding for finding in dict.fromkeys(findings) if finding][:2])[:RAS_LIMIT]


def _describe_communicator(item: Mapping[str, Any], world_size: int) -> str:
    size = int(item["size"])
    group = "" if size == world_size else f" of a communicator of {size}"
    silent = [int(entry["rank"]) for entry in item["missing_ranks"] if entry["status"]["unresponsive"]]
    if silent:
        return f"{_name_ranks(silent)}{group} did not respond"
    for operation in ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce"):
        counts = {int(entry["rank"]): int(entry["collective_counts"][operation]) for entry in item["ranks"]}
        least = min(counts.values(), default=0)
        most = max(counts.values(), default=0)
        if least < most:
            behind = _name_ranks([rank for rank, count in counts.items() if count == least])
            return f"{behind}{group} launched up to {operation} {least}, the others up to {most}"
    return ""


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_MOST_NAMED]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', …' if len(ranks) > _MOST_NAMED else ''}"
