"""Closes the record of a run whose `ddp run` is gone: killed, it could not write that itself.

Nothing that it has started outlives it, so there is nobody to do it at once. Whoever comes by does: `ddp report` of
that run, and the next `ddp run` beside it. Until then the first line of status.yaml says whose word it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import yaml

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.status import ENDED_PHASES, Status
from ddp_operator.cluster import claim_of
from ddp_operator.local.folder import RunFolder
from ddp_operator.local.summary import describe_run
from ddp_operator.status import conditions
from ddp_operator.status.attempts import fail
from ddp_operator.status.observation import Pods


def close_record(folder: RunFolder) -> bool:
    """Write into the folder of a run that nobody runs any more that this is so; return whether it was done now.

    Never beside a living writer (it holds the folder's lock) nor beside another one who closes it, and not where that
    cannot be told, as on another host than the writer's. Raises: OSError.
    """
    if folder.in_use or not folder.was_written_here:
        return False
    with folder.alone() as alone:
        if not alone:
            return False
        written = folder.status.stat()
        ended = datetime.fromtimestamp(written.st_mtime, UTC)
        try:
            resource = yaml.safe_load(folder.status.read_text(encoding="utf-8"))
            closed = interrupt(resource, folder.typed, ended)
        except (yaml.YAMLError, InvalidManifest, AttributeError, TypeError):
            return False  # no words of ours
        if closed is None or not folder.write_status(closed):
            return False
        os.utime(folder.status, ns=(written.st_atime_ns, written.st_mtime_ns))  # no run is newer for being closed
        folder.clear()  # before the summary, which says that there is nothing to clear
        status = msgspec.convert(closed["status"], Status)
        began = status.start_time or ended
        name, seconds = closed["metadata"]["name"], (ended - began).total_seconds()
        folder.write_summary(describe_run(name, status, folder, seconds=seconds, interrupted=True) + "\n")
    return True


def interrupt(resource: Mapping[str, Any], command: str, now: datetime) -> dict[str, Any] | None:
    """Return the resource of a job that nobody runs any more as it is to be kept; None where the job had ended.

    Raises: InvalidManifest.
    """
    job = parse_resource(resource)
    if job.status.phase in ENDED_PHASES:
        return None
    words = explain_interruption(resource, job.status, command)
    decision = fail(job, Pods(), None, conditions.INTERRUPTED, words, now)
    return {**resource, "status": msgspec.to_builtins(decision.status)}


def explain_interruption(resource: Mapping[str, Any], status: Status, command: str) -> str:
    """Say that nobody runs the job any more, and how it goes on."""
    failed = status.condition(conditions.FAILED)
    if failed is not None and failed.reason == conditions.INTERRUPTED:
        return failed.message
    words = f"The `ddp run` that wrote this ended before the job did; its last status says {status.phase}. "
    claim = claim_of(resource)
    # Where the script itself saves, only the script knows.
    begin = "No claim of the job keeps its checkpoints: from what the script keeps elsewhere, or anew, it goes on"
    how = f"Go on from the newest checkpoint in claim {claim}" if claim else begin
    return f"{words}{how} with: {command or 'ddp run FILE'}"
