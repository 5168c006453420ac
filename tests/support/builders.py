"""Small builders for tests: manifests, typed jobs, and Jobs and pods as an API server returns them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from ddp_operator.api import child_names, constants, other_kinds
from ddp_operator.api.cluster import Snapshot
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.status import Status
from ddp_operator.decide.report import Page
from ddp_operator.decide.state import Observation
from ddp_operator.features import SCHEMA
from ddp_operator.reading.objects import view_children
from ddp_operator.reading.pages import decode_report
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.records import to_json
from tests.support.launcher_config import encoded_config

Json = dict[str, Any]

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
UID = "11111111-2222-3333-4444-555555555555"


def trainer(**changes: Any) -> Json:
    """Return a training container; a change of None leaves a member out."""
    container = {"name": "trainer", "image": "example.com/train:1", "command": ["python", "train.py"]}
    return {name: value for name, value in {**container, **changes}.items() if value is not None}


def template(*containers: Json, metadata: Any = None, **pod: Any) -> Json:
    """Return a pod template, by default of one container."""
    made: Json = {"spec": {"containers": list(containers) or [trainer()], **pod}}
    return made if metadata is None else made | {"metadata": metadata}


def resource(
    name: str = "train", *, namespace: str = "default", labels: Any = None, annotations: Any = None, **spec: Any
) -> Json:
    """Return a DDPTrainingJob as its user writes it."""
    metadata: Json = {"name": name, "namespace": namespace}
    metadata |= {"labels": labels} if labels else {}
    metadata |= {"annotations": annotations} if annotations else {}
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "metadata": metadata,
        "spec": {"template": template(), **spec},
    }


def claiming(**container: Any) -> Json:
    """Return a pod template whose trainer uses a resource claim."""
    resources = {**container.pop("resources", {}), "claims": [{"name": "gpus"}]}
    entry = {"name": "gpus", "resourceClaimTemplateName": "h100"}
    return template(trainer(resources=resources, **container), resourceClaims=[entry])


def profile(job: Any, *, name: str = "gpu", kind: str = other_kinds.CLUSTER_PROFILE_KIND) -> Json:
    """Return a profile as a platform engineer writes it."""
    metadata = {"name": name} | ({"namespace": "default"} if kind == other_kinds.PROFILE_KIND else {})
    return {"apiVersion": constants.API_VERSION, "kind": kind, "metadata": metadata, "spec": {"job": job}}


def job(name: str = "train", *, status: Status | None = None, **spec: Any) -> DDPTrainingJob:
    """Return a stored job, typed."""
    raw = resource(name, **spec)
    raw["metadata"] |= {"uid": UID, "generation": 1, "resourceVersion": "1"}
    if status is not None:
        raw["status"] = msgspec.to_builtins(status)
    return parse_resource(raw, SCHEMA)


def observe(
    typed: DDPTrainingJob, jobs: Iterable[Json], pods: Iterable[Json], page: Page | None = None, **answers: Any
) -> Observation:
    """Return the observation of a job: its children, and ``answers``, which are further fields of the observation."""
    seen = view_children(typed, Snapshot({}, jobs=tuple(jobs), pods=tuple(pods)))
    answers["page_requested"] = answers.get("page_requested", False) or page is not None
    return Observation(seen.jobs, seen.pods, seen.orphans, page=page, **answers)


def child_job(attempt: int = 1, *, nodes: int = 2, name: str = "train", owner: str = UID, **changes: Any) -> Json:
    """Return a child Job. ``conditions`` maps types to messages; ``deleting`` and ``suspend`` set these fields.

    ``written``: the operator's record of the ``suspend`` that it wrote (default: the present value; None: no record);
    ``queue``: Kueue's label; ``awaits_peers``: its launchers do; ``gang``: the PodGroup in its template;
    ``status``: members of the raw status.
    """
    conditions: Mapping[str, str] = changes.pop("conditions", {})
    at = format_time(changes.pop("at", NOW))
    metadata: Json = {
        "name": child_names.job_name(name, attempt),
        "namespace": "default",
        "uid": f"job-{attempt}",
        "labels": child_names.child_labels(name, attempt),
        "ownerReferences": [
            {
                "apiVersion": constants.API_VERSION,
                "kind": constants.KIND,
                "name": name,
                "uid": owner,
                "controller": True,
            }
        ],
    }
    if changes.pop("deleting", False):
        metadata["deletionTimestamp"] = at
    suspend = changes.pop("suspend", False)
    written = changes.pop("written", suspend)
    if written is not None:
        metadata["annotations"] = {constants.ANNOTATION_SUSPEND: str(written).lower()}
    if queue := changes.pop("queue", ""):
        metadata["labels"][constants.KUEUE_QUEUE_LABEL] = queue
    spec: Json = {"completions": nodes, "parallelism": nodes, "suspend": suspend}
    if changes.pop("awaits_peers", False):
        config = encoded_config(nodes=2, in_place_restarts=1, restarts_without_progress=1)
        spec["template"] = template(trainer(env=[{"name": name, "value": text} for name, text in config.items()]))
    if gang := changes.pop("gang", ""):
        spec.setdefault("template", {}).setdefault("spec", {})["schedulingGroup"] = {"podGroupName": gang}
    status: Json = changes.pop("status", {})
    assert not changes, changes
    stated = [
        {"type": kind, "status": "True", "message": message, "lastTransitionTime": at}
        for kind, message in conditions.items()
    ]
    return {"kind": "Job", "metadata": metadata, "spec": spec, "status": {"conditions": stated} | status}


def child_pod(index: int = 0, phase: str = "Running", *, attempt: int = 1, name: str = "train", **changes: Any) -> Json:
    """Return a pod of a child Job.

    ``code`` and ``message``: how its training container ended (``at`` that time); ``suffix``: the end of its name;
    ``age``: seconds since its creation; ``owner``: its Job's UID; ``disrupted`` (True or a reason), ``deleting`` (at
    ``at``, with ``grace`` seconds), ``ready``, ``unready`` (since when), ``node``; ``status``: members of the raw
    status.
    """
    at: datetime = changes.pop("at", NOW)
    job_name = child_names.job_name(name, attempt)
    owner = changes.pop("owner", f"job-{attempt}")
    created = NOW - timedelta(seconds=changes.pop("age", 60))
    own = f"{job_name}-{index}-{changes.pop('suffix', 'abcde')}"
    metadata: Json = {
        "name": own,
        "namespace": "default",
        "uid": f"uid-{own}",
        "creationTimestamp": format_time(created),
        "labels": child_names.child_labels(name, attempt),
        "annotations": {constants.ANNOTATION_COMPLETION_INDEX: str(index)},
        "ownerReferences": [
            {"apiVersion": "batch/v1", "kind": "Job", "name": job_name, "uid": owner, "controller": True}
        ],
    }
    if changes.pop("deleting", False):
        grace = changes.pop("grace", 0)
        metadata |= {
            "deletionTimestamp": format_time(at + timedelta(seconds=grace)),
            "deletionGracePeriodSeconds": grace,
        }
    spec: Json = {"containers": [{"name": "trainer"}], **changes.pop("spec", {})}
    node = changes.pop("node", "node-a" if phase != "Pending" else "")
    if node:
        spec["nodeName"] = node
    conditions = [{"type": "Ready", "status": "True" if changes.pop("ready", phase == "Running") else "False"}]
    if unready := changes.pop("unready", None):
        # As the node controller leaves the pods of a silent node.
        conditions = [
            {"type": "Ready", "status": "False", "lastTransitionTime": format_time(unready)},
            {"type": "ContainersReady", "status": "True"},
        ]
    if disrupted := changes.pop("disrupted", False):
        reason = {"reason": disrupted, "message": "words"} if isinstance(disrupted, str) else {}
        conditions.append({"type": "DisruptionTarget", "status": "True", **reason})
    status: Json = {"phase": phase, "conditions": conditions, "podIP": "10.0.0.1"}
    if phase != "Pending":
        status["startTime"] = format_time(created)
    code = changes.pop("code", 0 if phase == "Succeeded" else None)
    message = changes.pop("message", "")
    if code is not None:
        ended = {"exitCode": code, "reason": changes.pop("reason", "Error"), "finishedAt": format_time(at)}
        text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
        status["containerStatuses"] = [{"name": "trainer", "state": {"terminated": ended | {"message": text}}}]
    status |= changes.pop("status", {})
    assert not changes, changes
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def last_words(category: str = "", **members: Any) -> Json:
    """Return a termination message as the launcher writes it."""
    base = {
        "version": 2,
        "category": category,
        "exitCode": 1 if category else 0,
        "rank": 0,
        "localRank": 0,
        "podIndex": 0,
        "message": f"{category} happened" if category else "",
        "traceback": "",
        "remedy": "",
        "time": NOW.timestamp(),
        "restarts": 0,
        "secondary": False,
    }
    return base | members


def page(**values: Any) -> str:
    """Return the report of pod 0: ``page(step=3, phase='Running')``, with numbers of RankProgress of one rank.

    ``restarts``: number of restarts of the workers in the pod; ``answered``: the message of the last failure; ``rank``:
    the reporting rank, 0; ``loss`` may be NaN; other members of the report are passed as they are in JSON.
    """
    report: Json = {"version": 2}
    for name, key in (("phase", "phase"), ("restarts", "restarts"), ("answered", "lastFailure")):
        report |= {key: value} if (value := values.pop(name, None)) is not None else {}
    report |= {name: values.pop(name) for name in REPORT_MEMBERS & values.keys()}
    stall = {key: values.pop(name) for name, key in STALL_MEMBERS.items() if name in values}
    report |= {"stall": stall} if stall else {}
    if values:
        report["ranks"] = [rank_json(values.pop("rank", 0), **values)]
    return json.dumps(report)


def join(*reports: str) -> str:
    """Return one report with the members of several."""
    joined: Json = {}
    for report in map(json.loads, reports):
        joined |= report
    return json.dumps(joined)


REPORT_MEMBERS = {
    "dev",
    "restartStep",
    "preflight",
    "uploads",
    "runs",
    "inputs",
    "unreachable",
    "stepHint",
    "groups",
    "ranks",
}
STALL_MEMBERS = {"heartbeat_age": "heartbeatAge", "stalled": "seconds", "stalled_ranks": "ranks", "awaited": "awaited"}


def respond(page: str | None) -> bytes | None:
    """Return the response to a request of a report; None: the pod does not respond."""
    return None if page is None else page.encode("utf-8", "replace")


def rank_json(rank: int = 0, **numbers: float) -> Json:
    """Return the progress of a rank as JSON."""
    progress = RankProgress(rank)
    progress.update({name: float(number) for name, number in numbers.items()})
    progress.note_lost_loss()
    return to_json(progress)


def decode(text: str) -> Page:
    """Return a report as the operator reads it."""
    return decode_report(text.encode("utf-8", "replace"))


def job_manifest(name: str = "digits", **spec: Any) -> dict[str, Any]:
    """A small valid custom resource."""
    return {
        "apiVersion": "ddp-operator.dev/v1alpha1",
        "kind": "DDPTrainingJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": 2,
            "template": {
                "spec": {"containers": [{"name": "trainer", "image": "train:1", "command": ["python", "train.py"]}]}
            },
        }
        | spec,
    }
