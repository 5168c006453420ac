"""One scenario for every cluster: create, rank 1 fails once, recover, succeed. Compare its history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.builders import job_manifest
from tests.support.counts import read_counts

NAME = "twice"
FAILURE = "RuntimeError: rank 1 was told to fail"
SCRIPT = f"""
import os, time
while not os.path.exists(f"{{__file__}}.{{os.environ['DDP_ATTEMPT']}}"):  # until the status says that it runs
    time.sleep(0.05)
if os.environ["RANK"] == "1" and os.environ["DDP_ATTEMPT"] == "1":
    raise RuntimeError("{FAILURE.partition(": ")[2]}")
if os.environ["DDP_ATTEMPT"] == "1":
    time.sleep(600)
"""
# Their order depends on which pod is observed first, not on decisions.
_TIMING_REASONS = {"Scheduled", "Rendezvoused", "Progressing"}


FAILURE_FIELDS = ("attempt", "rank", "podIndex", "exitCode", "category", "message")


def build_resource(command: list[str], **spec: Any) -> dict[str, Any]:
    """Return the job of the scenario, without restarts in the same pods, so that all clusters start a new attempt."""
    template = {"spec": {"containers": [{"name": "trainer", "image": "train:1", "command": command}]}}
    return job_manifest(
        NAME, **{"recovery": {"inPlaceRestarts": 0, "maxRestarts": 2, "warmStart": "Off"}, "template": template} | spec
    )


@dataclass
class DecisionHistory:
    """The history that a watcher of the resource's status sees, without times and repetitions."""

    phases: list[str] = field(default_factory=list)
    conditions: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)

    def add(self, status: Mapping[str, Any]) -> None:
        """Record one status."""
        if not status.get("phase"):
            return
        self.last = status
        _extend(self.phases, status["phase"])
        for condition in status.get("conditions") or ():
            kind = condition["type"]
            reason = "" if kind in _TIMING_REASONS else condition["reason"]
            _extend(self.conditions.setdefault(kind, []), (condition["status"], reason))

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal on every cluster."""
        failure = self.last.get("lastFailure") or {}
        counts = read_counts(self.last)
        return {
            "phases": self.phases,
            "conditions": self.conditions,
            "attempt": self.last.get("attempt"),
            "restarts": {k: counts[k] for k in ("total", "counted", "free", "inPlace")},
            "lastFailure": {
                k: failure.get(k) for k in ("attempt", "rank", "podIndex", "exitCode", "category", "message")
            },
        }


def _extend(sequence: list[Any], item: Any) -> None:
    if not sequence or sequence[-1] != item:
        sequence.append(item)
