"""Parse YAML or JSON into typed values. Every refusal names the field and the remedy.

``parse_resource`` parses an object that an API server has validated. ``parse_manifest`` also does the validation of
the API server (schema, defaults, CEL rules), for tools that work without one.

Without an API server a wrong job is refused in this order: the text of a file by ``documents``, the size by ``size``,
names and types here, values and combinations by ``rules``, the pod template by ``manifests/template``. In a cluster
the CRD (``crd``, with the same rules) refuses names, types, values and combinations at `kubectl apply`; the operator's
``reconciler._parse_job`` what is stored nevertheless, ``executor.check`` the template, and a refusal of the children by
the API server becomes the condition Accepted. A feature has the rules and checks of its fields in its folder.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ddp_operator.api import constants
from ddp_operator.api.crd import build_spec_schema
from ddp_operator.api.documents import load_documents
from ddp_operator.api.errors import FieldError, InvalidManifest, check_strings, unknown_member
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.profile import merge_profile, profile_reference, read_profile
from ddp_operator.api.schema import Schema
from ddp_operator.api.size import refuse_oversize
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Profile, Status
from ddp_operator.api.stored_fields import read_status


@dataclass(frozen=True, slots=True)
class Manifest:
    """The objects of one file: the training job with its defaults, and others such as ConfigMaps."""

    job: DDPTrainingJob
    resource: Mapping[str, Any]
    others: tuple[Mapping[str, Any], ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict)
    """The job of the file, without defaults."""
    completed: Mapping[str, Any] = field(default_factory=dict)
    """The spec of the file merged with its profile, without defaults."""
    profile: Profile | None = None
    children: tuple[Mapping[str, Any], ...] = ()
    """The children of the first attempt in the order of creation. ``validation`` sets them."""


def parse_status(raw: Mapping[str, Any]) -> Status:
    """Return the status of a resource without the fields that cannot be read; the next pass overwrites them."""
    return read_status(raw).status


def parse_resource(raw: Mapping[str, Any], schema: Schema) -> DDPTrainingJob:
    """Return the typed resource. Raises: InvalidManifest."""
    metadata = raw.get("metadata")
    if not isinstance(metadata, Mapping):
        raise InvalidManifest([FieldError("metadata", "Required value: add metadata.name")])
    return DDPTrainingJob(
        name=metadata.get("name") or "",
        namespace=metadata.get("namespace") or "default",
        uid=metadata.get("uid") or "",
        generation=metadata.get("generation") or 0,
        resource_version=metadata.get("resourceVersion") or "",
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
        deleting="deletionTimestamp" in metadata,
        created=metadata.get("creationTimestamp") or "",
        spec=_parse_spec(raw.get("spec"), schema),
        status=parse_status(raw),
        schema=schema,
    )


def complete_job(resource: Mapping[str, Any], profile: Profile | None, schema: Schema) -> DDPTrainingJob:
    """Return the typed resource, completed by its profile. Raises: InvalidManifest."""
    if profile is None:
        return parse_resource(resource, schema)
    refuse_oversize(resource.get("spec"))
    return parse_resource({**resource, "spec": merge_profile(resource["spec"], profile)}, schema)


FindProfile = Callable[[str, str, str], Mapping[str, Any] | None]
"""Returns a profile by its kind, the namespace that the job names (or ""), and its name; None if there is none."""


def find_none(kind: str, namespace: str, name: str) -> None:
    """Return None for every profile."""


def find_among(documents: Iterable[Mapping[str, Any]], otherwise: FindProfile = find_none) -> FindProfile:
    """Return a function that finds profiles among these objects, in any namespace, and then by ``otherwise``."""
    by_name = {(document.get("kind"), (document.get("metadata") or {}).get("name")): document for document in documents}
    return lambda kind, namespace, name: by_name.get((kind, name)) or otherwise(kind, namespace, name)


def parse_manifest(
    text: str, schema: Schema, code: Mapping[str, Any] | None = None, profiles: FindProfile = find_none
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

    own = _as_stored(raw.get("spec"), schema.document)
    profile = _find_profile(raw, find_among(others, profiles))
    completed = own if profile is None else merge_profile(own, profile)
    job = parse_resource(dict(raw) | {"spec": completed}, schema)
    spec = msgspec.json.decode(msgspec.json.encode(job.spec))

    from ddp_operator.api.cel import check_rules  # needs cel-expr-python, which the operator's image does not have

    # As in a cluster: the API server checks the job without its profile, then the operator has it check the whole.
    stored = build_spec_schema(schema)
    for checked in (own, spec) if job.spec.profile_ref else (spec,):
        errors = check_rules(dict(raw) | {"spec": _with_defaults(checked, stored)}, schema)
        if errors:
            raise InvalidManifest(errors)

    resource = dict(raw) | {"spec": _with_defaults(spec, schema.document)}
    return Manifest(job, resource, others, dict(raw) | {"spec": own}, completed, profile)


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


def _find_profile(raw: Mapping[str, Any], profiles: FindProfile) -> Profile | None:
    """Return the profile that a manifest names. Raises: InvalidManifest."""
    reference = profile_reference(raw)
    if reference is None:
        return None
    kind, name = reference
    raw_profile = profiles(kind, raw["metadata"].get("namespace") or "", name)
    if raw_profile is None:
        message = (
            f"{kind} {name} does not exist; create it, pass a file that has it with --profiles, or correct the name"
        )
        raise InvalidManifest([FieldError("spec.profileRef", message)])
    return read_profile(raw_profile)


def _check_shape(raw: Mapping[str, Any], schema: Schema) -> None:
    """Check the top-level fields and the metadata. Raises: InvalidManifest."""
    errors = []
    members = schema.document["properties"]
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


_CONTAINER = "spec.template.spec.containers"
# Names of other operators, torchrun and Kubernetes for fields that have another name or place here -> the remedy.
_ELSEWHERE = {
    **dict.fromkeys(
        ("gpu", "gpus", "gpuPerNode", "gpusPerNode", "numGpus"),
        f"request GPUs as nvidia.com/gpu in resources.limits of the container, in {_CONTAINER}",
    ),
    **dict.fromkeys(
        ("image", "command", "args", "env", "resources", "volumeMounts", "script", "entrypoint"),
        f"it belongs to the container, in {_CONTAINER}",
    ),
    **dict.fromkeys(("replicas", "workers", "numNodes", "nnodes", "worldSize"), "write nodes: the number of pods"),
    **dict.fromkeys(("nprocPerNode", "nproc_per_node", "numProcPerNode", "procs"), "write procPerNode"),
    **dict.fromkeys(("maxRestarts", "backoffLimit", "restartPolicy"), "write recovery.maxRestarts"),
    **dict.fromkeys(("containers", "volumes", "nodeSelector", "tolerations"), "it belongs below spec.template.spec"),
    "queue": "write scheduling.queue, or for Kueue the label kueue.x-k8s.io/queue-name",
}
_TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec", "status")
# Members of Kubernetes' ObjectMeta; those that users write come first.
_METADATA = (
    *("name", "namespace", "labels", "annotations", "generateName", "finalizers", "ownerReferences"),
    *("creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "generation", "managedFields"),
    *("resourceVersion", "selfLink", "uid"),
)


def _parse_spec(raw: Any, schema: Schema) -> Spec:
    if raw is None:
        raise InvalidManifest([FieldError("spec", "Required value: add spec with at least spec.template")])
    refuse_oversize(raw)
    try:
        return msgspec.convert(_as_stored(raw, schema.document), schema.spec)
    except msgspec.ValidationError as error:
        raise InvalidManifest([_explain(str(error), schema.document)]) from None


def _as_stored(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a value as the API server stores it: without nulls, and 2.0 as 2. Types of Kubernetes are unchanged."""
    if isinstance(value, int | float) and not -(2**63) <= value < 2**63:
        return math.inf  # not an integer of 64 bits; an infinite float is never converted back to an integer
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_as_stored(item, schema.get("items", {})) for item in value]
    if not isinstance(value, Mapping) or "x-kubernetes-preserve-unknown-fields" in schema:
        return value
    known = schema.get("properties", {})
    return {
        key: _as_stored(item, known.get(key, {}))
        for key, item in value.items()
        if item is not None or key not in known  # kubectl refuses an unknown field even if its value is null
    }


def _explain(text: str, schema: Mapping[str, Any]) -> FieldError:
    """Convert an error message of msgspec to the API server's message, with a remedy."""
    match = re.fullmatch(r"(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?", text, re.DOTALL)
    assert match
    path = "spec" + (match["path"] or "")
    problem = match["problem"]

    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", problem)
    if unknown:
        name = unknown[1]
        known = tuple(_schema_at(path, schema).get("properties", ()))
        remedy = _ELSEWHERE.get(name, "") if path == "spec" else ""
        return unknown_member(name, path, known, belongs=remedy)

    missing = re.fullmatch(r"Object missing required field `(.*)`", problem)
    if missing:
        return FieldError(f"{path}.{missing[1]}", "Required value: it has no default; add it")

    wrong_type = re.fullmatch(r"Expected `(.*)`, got `(.*)`", problem)
    if wrong_type:
        expected = _json_type(wrong_type[1].replace(" | null", ""))
        actual = _json_type(wrong_type[2])
        remedy = _find_type_remedy(expected, _schema_at(path, schema))
        message = f'{path} in body must be of type {expected}: "{actual}"; {remedy}'
        return FieldError(path, message, actual)

    wrong_choice = re.fullmatch(r"Invalid enum value '?(.*?)'?", problem)
    if wrong_choice:
        allowed = ", ".join(f'"{choice}"' for choice in _schema_at(path, schema).get("enum", ()))
        return FieldError(path, f'Unsupported value: "{wrong_choice[1]}": supported values: {allowed}')

    return FieldError(path, problem)


def _find_type_remedy(expected: str, schema: Mapping[str, Any]) -> str:
    """Return how to write a value of a JSON type. ``schema``: of the field."""
    members = schema.get("properties")
    if expected == "object" and members:
        return f"write its fields below it: {', '.join(members)}"
    return _TYPE_REMEDIES.get(expected, "write one")


_TYPE_REMEDIES = {
    "integer": "write a whole number, without quotes",
    "boolean": "write true or false, without quotes",
    "string": "quote it",
    "array": "write a list: [a, b], or one line with '- ' for each item",
    "object": "write its fields below it",
}
_JSON_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}


def _json_type(text: str) -> str:
    return re.sub(r"\b(int|float|str|bool)\b", lambda m: _JSON_TYPES[m[0]], text)


def _schema_at(path: str, spec: Mapping[str, Any]) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = {"properties": {"spec": spec}}
    for name in re.sub(r"\[.*?\]", "", path).split("."):
        schema = schema.get("properties", {}).get(name, {})
        schema = schema.get("items", schema)
    return schema


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
