"""Closes the record of a run whose `ddp run` was killed and could not do so itself.

`ddp report` of that run does, or the next `ddp run` with the same `--runs-dir`. Until then the first line of its
status.yaml names the process that wrote it.
"""

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
from ddp_operator.status.observation import Observation, State


def close_record(folder: RunFolder) -> bool:
    """Mark a run whose `ddp run` is gone as interrupted; return whether this call did. Raises: OSError.

    It does nothing while the writer lives (which holds the folder's lock), and on another host than the writer's, where
    that cannot be known.
    """
    if folder.in_use or not folder.was_written_here:
        return False
    written = folder.status.stat()
    ended = datetime.fromtimestamp(folder.last_write(), UTC)
    try:
        resource = yaml.safe_load(folder.status.read_text(encoding="utf-8"))
        closed = interrupt(resource, folder.command_line, ended)
    except (yaml.YAMLError, InvalidManifest, AttributeError, TypeError):
        return False  # not written by `ddp run`
    if closed is None or not folder.write_status(closed):
        return False
    os.utime(folder.status, ns=(written.st_atime_ns, written.st_mtime_ns))  # keep the order of runs by time
    folder.clear()  # before the summary, whose presence means that nothing is left to clear
    status = msgspec.convert(closed["status"], Status)
    began = status.start_time or ended
    name, seconds = closed["metadata"]["name"], (ended - began).total_seconds()
    folder.write_summary(describe_run(name, status, folder, seconds=seconds, interrupted=True) + "\n")
    return True


def interrupt(resource: Mapping[str, Any], command: str, now: datetime) -> dict[str, Any] | None:
    """Return the resource with the status of an interrupted job; None if the job had ended.

    Raises: InvalidManifest.
    """
    job = parse_resource(resource)
    if job.status.phase in ENDED_PHASES:
        return None
    message = explain_interruption(resource, job.status, command)
    decision = fail(State(job, Observation(), now), None, conditions.INTERRUPTED, message)
    return {**resource, "status": msgspec.to_builtins(decision.status)}


def explain_interruption(resource: Mapping[str, Any], status: Status, command: str) -> str:
    """Return that the run was interrupted, and how to resume it."""
    failed = status.condition(conditions.FAILED)
    if failed is not None and failed.reason == conditions.INTERRUPTED:
        return failed.message
    words = f"`ddp run` ended before the job did; its last status is {status.phase}. "
    claim = claim_of(resource)
    # Where the script itself saves, only the script knows.
    how = "The job keeps no checkpoints on a claim: resume from what the script saved elsewhere, or start again,"
    if claim and status.checkpoint is not None:
        how = f"Resume from the checkpoint of step {status.checkpoint.step} on claim {claim}"
    elif claim:
        how = f"No checkpoint was reported: resume from what claim {claim} holds, if anything, or start again,"
    return f"{words}{how} with: {command or 'ddp run FILE'}"
