"""Parse the YAML file of a job, for tools that work without an API server.

``parse_manifest`` also does the validation of the API server: schema, defaults, CEL rules.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from ddp_operator.api import constants
from ddp_operator.api.completion import complete_spec, find_completing
from ddp_operator.api.crd import build_spec_schema
from ddp_operator.api.documents import load_documents
from ddp_operator.api.errors import FieldError, InvalidManifest, check_strings
from ddp_operator.api.faults import name_object
from ddp_operator.api.former import find_former
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parts import call_owner
from ddp_operator.api.schema import Schema
from ddp_operator.api.size import refuse_oversize
from ddp_operator.api.status import Profile
from ddp_operator.api.structural import document_of
from ddp_operator.api.written import as_stored, parse_written, unknown_member

_TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec", "status")
# Members of Kubernetes' ObjectMeta; those that users write come first.
_METADATA = (
    *("name", "namespace", "labels", "annotations", "generateName", "finalizers", "ownerReferences"),
    *("creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "generation", "managedFields"),
    *("resourceVersion", "selfLink", "uid"),
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The objects of one file: the training job with its defaults, and others such as ConfigMaps."""

    job: DDPTrainingJob
    resource: Mapping[str, Any]
    others: tuple[Mapping[str, Any], ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict)
    """The job of the file in the form of this version, without defaults."""
    completed: Mapping[str, Any] = field(default_factory=dict)
    """The spec of the file merged with its profile, without defaults."""
    profile: Profile | None = None
    deprecated: tuple[FieldError, ...] = ()
    """The former fields of the file and the profile, each with what to write instead."""
    children: tuple[Mapping[str, Any], ...] = ()
    """The children of the first attempt in the order of creation. ``validation`` sets them."""


FindObject = Callable[[str, str, str], Mapping[str, Any] | None]
"""Returns an object by its kind, the namespace that the job names (or ""), and its name; None if there is none."""


def find_none(kind: str, namespace: str, name: str) -> None:
    """Return None for every object."""


def find_among(documents: Iterable[Mapping[str, Any]], otherwise: FindObject = find_none) -> FindObject:
    """Return a function that finds one of these objects, in any namespace, and then by ``otherwise``."""
    by_name = {(document.get("kind"), (document.get("metadata") or {}).get("name")): document for document in documents}
    return lambda kind, namespace, name: by_name.get((kind, name)) or otherwise(kind, namespace, name)


def parse_manifest(
    text: str, schema: Schema, code: Mapping[str, Any] | None = None, profiles: FindObject = find_none
) -> Manifest:
    """Return the training job of a YAML file, fully checked offline. The file may have further objects.

    ``code``: replaces spec.code, except mountPath and pip of the file.
    ``profiles``: finds a profile that is not in the file.

    Raises: InvalidManifest.
    """
    documents = load_documents(text)
    raw = _select_job(documents)
    _check_shape(raw, schema)
    refuse_oversize(raw.get("spec"))
    others = tuple(document for document in documents if document is not raw)

    if code is not None and isinstance(raw.get("spec"), Mapping):
        written = raw["spec"].get("code") or {}
        kept = {name: written[name] for name in written if name in ("mountPath", "pip")}
        raw = {**raw, "spec": {**raw["spec"], "code": {**kept, **code}}}

    own = as_stored(schema.take_over(raw.get("spec")), document_of(schema.spec))
    profile = find_values(raw, schema, find_among(others, profiles))
    completed = own if profile is None else complete_spec(schema, dict(raw) | {"spec": own}, profile)
    job = parse_written(dict(raw) | {"spec": completed}, schema)
    spec = msgspec.json.decode(msgspec.json.encode(job.spec))

    from ddp_operator.api.cel import check_rules  # needs cel-expr-python, which the operator's image does not have

    # As in a cluster: the API server checks the job without its profile, then the operator has it check the whole.
    stored = build_spec_schema(schema)
    for checked in (spec,) if profile is None else (own, spec):
        errors = check_rules(dict(raw) | {"spec": _with_defaults(checked, stored)}, schema)
        if errors:
            raise InvalidManifest(errors)

    resource = dict(raw) | {"spec": _with_defaults(spec, document_of(schema.spec))}
    deprecated = tuple(_find_deprecated(raw.get("spec"), profile, schema))
    return Manifest(job, resource, others, dict(raw) | {"spec": own}, completed, profile, deprecated)


def _find_deprecated(spec: Any, profile: Profile | None, schema: Schema) -> Iterator[FieldError]:
    yield from find_former(spec, schema.former)
    if profile is not None:
        yield from find_former(profile.job, schema.former, f"{profile.kind} {profile.name}: spec.job")


def _select_job(documents: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the only training job among the objects of a file. Raises: InvalidManifest."""
    jobs = [document for document in documents if document.get("kind") == constants.KIND]
    if len(jobs) != 1:
        kinds = {str(document.get("kind")) for document in documents}
        listed = ", ".join(sorted(kinds)) or "nothing"
        problem = f"{len(jobs)} objects of" if jobs else "no"
        remedy = "it must have exactly one" if jobs else "`ddp init SCRIPT` writes one"
        if "PyTorchJob" in kinds and not jobs:
            remedy = "convert the PyTorchJob with `ddp convert`"
        message = f"the file has {problem} kind {constants.KIND} (found: {listed}); {remedy}"
        raise InvalidManifest([FieldError("kind", message)])

    [job] = jobs
    version = job.get("apiVersion")
    if version != constants.API_VERSION:
        message = f"must be {constants.API_VERSION}; change it"
        raise InvalidManifest([FieldError("apiVersion", message, version)])
    return job


def find_values(resource: Mapping[str, Any], schema: Schema, find: FindObject) -> Profile | None:
    """Return the values that a job names to complete its spec; None: it names none.

    Raises: InvalidManifest, and what ``find`` raises.
    """
    part = find_completing(schema)
    if part is None or part.completion is None:
        return None
    job = name_object(resource)
    reference = call_owner(part, job, partial(part.completion.refer, resource), tuple | None)
    if reference is None:
        return None
    kind, name = reference
    raw = find(kind, resource["metadata"].get("namespace") or "", name)
    if raw is None:
        remedy = "create it, pass a file that has it with --profiles, or correct the name"
        raise InvalidManifest([FieldError(part.paths[0], f"{kind} {name} does not exist; {remedy}")])
    return call_owner(part, job, partial(part.completion.read, raw), Profile)


def _check_shape(raw: Mapping[str, Any], schema: Schema) -> None:
    """Check the top-level fields and the metadata. Raises: InvalidManifest."""
    errors = []
    members = document_of(schema.spec)["properties"]
    for name in map(str, raw):
        if name not in _TOP_LEVEL:
            remedy = f"it belongs below spec: spec.{name}" if name in members else ""
            errors.append(unknown_member(name, "", _TOP_LEVEL, belongs=remedy))
    errors += _check_metadata(raw.get("metadata"))
    if errors:
        raise InvalidManifest(errors)


def _check_metadata(metadata: Any) -> list[FieldError]:
    """Return the errors of the metadata that the API server would report."""
    if metadata is not None and not isinstance(metadata, Mapping):
        return [FieldError("metadata", "must be an object with a name")]
    name = (metadata or {}).get("name")
    if name is not None and not isinstance(name, str):
        return [FieldError("metadata.name", "must be a string; quote it", name)]
    if not metadata or not name:
        return [FieldError("metadata.name", "Required value: add a name")]

    errors = [unknown_member(str(member), "metadata", _METADATA) for member in metadata if member not in _METADATA]
    for member in ("labels", "annotations"):
        error = check_strings(metadata.get(member), f"metadata.{member}")
        if error is not None:
            errors.append(error)
    namespace = metadata.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        errors.append(FieldError("metadata.namespace", "must be a string", namespace))
    return errors


def _with_defaults(value: Any, schema: Mapping[str, Any]) -> Any:
    """Add defaults as the API server does: at every level that is present or has a default."""
    if not isinstance(value, Mapping) or "properties" not in schema:
        return value
    filled = dict(value)
    for name, child in schema["properties"].items():
        if name not in filled and "default" in child:
            filled[name] = child["default"]
        if name in filled:
            filled[name] = _with_defaults(filled[name], child)
    return filled
