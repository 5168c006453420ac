"""Refusals: a name that is in use, a child that is refused, a resource or a status that cannot be read or written."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace

from ddp_operator._version import __version__
from ddp_operator.api import child_names, constants
from ddp_operator.api.cluster import controller_of, owner_uids
from ddp_operator.api.cluster_errors import Refused, ServerError
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parse import parse_status
from ddp_operator.api.size import OversizeSpec
from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact, is_finished, set_conditions, summarize
from ddp_operator.decide.state import Children, Refusal
from ddp_operator.decide.views import PodView

_VERSION_REMEDY = (
    f"the CRD {constants.CRD_NAME} in the cluster does not match this operator (version {__version__}): upgrade the "
    "operator, or apply the CRD of its version"
)
_UNATTENDED = "the job's pods keep running, but failures, suspension and resizing are not handled"
_MAX_TEXT: Final = 256
_DEFAULTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "type": ("ClusterIP",),
    "clusterIPs": (["None"],),
    "ipFamilies": (["IPv4"], ["IPv6"], ["IPv4", "IPv6"], ["IPv6", "IPv4"]),
    "ipFamilyPolicy": ("SingleStack", "PreferDualStack", "RequireDualStack"),
    "sessionAffinity": ("None",),
    "internalTrafficPolicy": ("Cluster",),
    "protocol": ("TCP",),
}
"""What an API server adds to a headless Service and to the ports of a NetworkPolicy."""
_REMEDY: Final = (
    "Apply the CRDs of this operator's version (deploy/crds); if the object is too large, shorten spec.template and "
    "its annotations"
)


def refuse_write(error: Refused) -> Refusal:
    """Return the refusal of a job whose child the API server does not accept."""
    if error.reason == "Invalid":
        return Refusal(c.INVALID_SPEC, error.message)
    return Refusal(c.FORBIDDEN, error.message)


def refuse_failing_server(error: ServerError) -> Refusal:
    """Return the refusal of a job whose child the API server repeatedly fails to create."""
    return Refusal(c.SERVER_ERROR, f"the API server fails to create {error.message}")


def refuse_invalid(error: InvalidManifest, subject: str = "") -> Refusal:
    """Return the refusal of an invalid spec. ``subject``: the object that is invalid, if it is not the job itself."""
    return Refusal(c.INVALID_SPEC, f"{subject}: {error}" if subject else str(error))


def explain_launcher_conflict(manifest: Mapping[str, Any], existing: Mapping[str, Any]) -> Refusal | None:
    """Return a refusal if another object has the name of the shared launcher."""
    meta = manifest["metadata"]
    existing_labels = existing["metadata"].get("labels") or {}
    same = all(existing.get(part) == manifest.get(part) for part in ("data", "binaryData", "immutable"))
    labelled = child_names.child_labels("").items() <= existing_labels.items()
    owners = {str(owner.get("uid")) for owner in meta.get("ownerReferences") or ()}
    if same and labelled and owner_uids(existing) <= owners:
        return None
    return Refusal(
        c.NAME_CONFLICT,
        f"ConfigMap {meta['name']} in namespace {meta['namespace']} differs from the operator's; delete it, and the "
        f"operator creates its own: kubectl -n {meta['namespace']} delete configmap {meta['name']}",
    )


def is_owned(job: DDPTrainingJob, raw: Mapping[str, Any]) -> bool:
    """Return whether an object is a child of this very resource."""
    return controller_of(raw).get("uid") == job.uid


def explain_conflict(job: DDPTrainingJob, raw: Mapping[str, Any]) -> Refusal | None:
    """Return a refusal if an object belongs neither to this job nor to a deleted job of the same name."""
    owner = controller_of(raw)
    group = str(owner.get("apiVersion")).partition("/")[0]
    same_name = (group, owner.get("kind"), owner.get("name")) == (constants.GROUP, constants.KIND, job.name)
    if same_name or is_owned(job, raw):
        return None
    kind = raw.get("kind") or "Service"
    meta = raw.get("metadata") or {}
    name = meta.get("name")
    labels = meta.get("labels") or {}
    if not owner and child_names.child_labels(job.name).items() <= labels.items():
        return Refusal(
            c.NAME_CONFLICT,
            f"metadata.name: {kind} {name} remains from a job of this name that was deleted with --cascade=orphan; its "
            "pods may still be training. Delete the remaining objects: "
            f"kubectl -n {job.namespace} delete job,service,configmap,networkpolicy "
            f"-l {constants.LABEL_JOB_NAME}={job.name}",
        )
    return Refusal(
        c.NAME_CONFLICT,
        f"metadata.name: {kind} {name} in namespace {job.namespace} does not belong to this job; rename the job or "
        "delete that object",
    )


def explain_difference(job: DDPTrainingJob, manifest: Mapping[str, Any], existing: Mapping[str, Any]) -> Refusal | None:
    """Return a refusal if a child of this job, as its owner states, is not as the operator would create it.

    Whoever may create a Service or a NetworkPolicy can name the job as its owner.
    """
    labels = (existing.get("metadata") or {}).get("labels") or {}
    is_own = owner_uids(existing) == {job.uid} and child_names.child_labels(job.name).items() <= labels.items()
    if is_own and is_as_built(existing.get("spec"), manifest["spec"]):
        return None
    kind = manifest["kind"]
    name = manifest["metadata"]["name"]
    return Refusal(
        c.NAME_CONFLICT,
        f"metadata.name: {kind} {name} in namespace {job.namespace} names this job as its owner, but differs from the "
        "operator's; delete it, and the operator creates its own: "
        f"kubectl -n {job.namespace} delete {kind.lower()} {name}",
    )


def explain_secret_conflict(job: DDPTrainingJob, name: str) -> Refusal:
    """Return a refusal of a Secret that another client has created, which the operator may not read."""
    return Refusal(
        c.NAME_CONFLICT,
        f"metadata.name: Secret {name} in namespace {job.namespace} is not the operator's; delete it, and the operator "
        f"creates its own: kubectl -n {job.namespace} delete secret {name}",
    )


def is_as_built(stored: Any, built: Any) -> bool:
    """Return whether a part of a stored object has what the operator built, and else only an API server's defaults."""
    if isinstance(built, Mapping):
        if not isinstance(stored, Mapping) or not built.keys() <= stored.keys():
            return False
        added = {name: value for name, value in stored.items() if name not in built}
        has_defaults = all(value in _DEFAULTS.get(name, ()) for name, value in added.items())
        return has_defaults and all(is_as_built(stored[name], part) for name, part in built.items())
    if isinstance(built, list | tuple):
        is_list = isinstance(stored, list) and len(stored) == len(built)
        return is_list and all(map(is_as_built, stored, built))
    return bool(stored == built)


def may_have_lost_labels(job: DDPTrainingJob, children: Children) -> bool:
    """Return whether the current attempt may have child objects that are missing here.

    Its Job counts more pods than were listed, or pods were listed whose Job was not. Mostly a watch is only late.
    """
    name = job.status.job_name
    current = next((view for view in children.jobs if view.name == name), None)
    if current is None:
        orphans = (pod for pod in children.orphans if pod.alive and not pod.deleting)
        return any(controller_of(pod.raw).get("name") == name for pod in orphans)

    # The Job counts a failed pod as active until it is replaced, after the Job controller's back-off.
    own_pods = [pod for pod in children.pods if controller_of(pod.raw).get("uid") == current.uid]
    listed = sum(pod.alive or _is_tracked(pod) for pod in own_pods)
    return int((current.raw.get("status") or {}).get("active") or 0) > listed


def _is_tracked(pod: PodView) -> bool:
    return constants.JOB_TRACKING_FINALIZER in (pod.raw["metadata"].get("finalizers") or ())


def report_unreadable(resource: Mapping[str, Any], error: InvalidManifest, now: datetime) -> tuple[Status, Status]:
    """Return the stored status and one with Accepted=False; a job that has ended keeps its status."""
    unattended = f"; until then {_UNATTENDED}" if parse_status(resource).attempt else ""
    refusal = Refusal(c.VERSION_MISMATCH, f"{error}; {_VERSION_REMEDY}{unattended}")
    if isinstance(error, OversizeSpec):
        refusal = Refusal(c.INVALID_SPEC, f"{error}{unattended}")
    return report_refused(resource, refusal, now)


def report_refused(resource: Mapping[str, Any], refusal: Refusal, now: datetime) -> tuple[Status, Status]:
    """Return the stored status and one with the refusal. A job that waits for an object or a feature stays Pending.

    A job that has ended keeps its status.
    """
    old = parse_status(resource)
    if is_finished(old):
        return old, old
    generation = (resource.get("metadata") or {}).get("generation") or 0
    new = old
    if not old.attempt:
        waits = refusal.reason in (c.PROFILE_NOT_FOUND, c.FEATURE_FAULT)
        new = replace(old, phase="Pending" if waits else "Rejected")
    fact = Fact(c.ACCEPTED, "False", refusal.reason, refusal.message)
    return old, summarize(set_conditions(new, [fact], now, generation))


def shorten_status(status: Status) -> Status:
    """Return a status without the fields on which no decision depends, and with short texts."""
    failure = status.last_failure
    if failure is not None:
        message = failure.message[:_MAX_TEXT]
        failure = replace(failure, message=message, traceback="", remedy=failure.remedy[:_MAX_TEXT])
    return replace(
        status,
        points=(),
        tracking=None,
        stragglers=(),
        last_failure=failure,
        conditions=tuple(replace(item, message=item.message[:_MAX_TEXT]) for item in status.conditions),
    )


def describe_refused_status(message: str) -> str:
    """Return the message of the condition and of the Event."""
    return f"the API server refuses the job's status, so the operator cannot handle the job: {message[:512]}. {_REMEDY}"


def report_refused_status(old: Status, message: str, resource: Mapping[str, Any], now: datetime) -> Status:
    """Return the stored status with Accepted=False: the API server has accepted the rest of it before."""
    fact = Fact(c.ACCEPTED, "False", c.STATUS_REFUSED, describe_refused_status(message))
    generation = (resource.get("metadata") or {}).get("generation") or 0
    return summarize(set_conditions(old, [fact], now, generation))
