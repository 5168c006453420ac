"""Parse the resource, which an API server has validated, into typed values. Every refusal names field and remedy.

Without an API server (``job_file``) a wrong job is refused in this order: the text of a file by ``documents``, the size
by ``size``, names and types here, values and combinations by ``rules``, the pod template by ``manifests/template``. In
a cluster the CRD (``crd``, with the same rules) refuses names, types, values and combinations at `kubectl apply`; the
operator's ``reconciler._parse_job`` what is stored nevertheless, ``executor.check`` the template, and a refusal of the
children by the API server becomes the condition Accepted. A feature has the rules and checks of its fields in its
folder.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ddp_operator.api.errors import FieldError, InvalidManifest, unknown_member
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.schema import Schema
from ddp_operator.api.size import refuse_oversize
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Profile, Status
from ddp_operator.api.stored_fields import read_status
from ddp_operator.api.structural import document_of


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
    return parse_resource({**resource, "spec": schema.complete(resource, profile)}, schema)


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


def _parse_spec(raw: Any, schema: Schema) -> Spec:
    if raw is None:
        raise InvalidManifest([FieldError("spec", "Required value: add spec with at least spec.template")])
    refuse_oversize(raw)
    document = document_of(schema.spec)
    try:
        return msgspec.convert(as_stored(raw, document), schema.spec)
    except msgspec.ValidationError as error:
        raise InvalidManifest([_explain(str(error), document)]) from None


def as_stored(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a value as the API server stores it: without nulls, and 2.0 as 2. Types of Kubernetes are unchanged."""
    if isinstance(value, int | float) and not -(2**63) <= value < 2**63:
        return math.inf  # not an integer of 64 bits; an infinite float is never converted back to an integer
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [as_stored(item, schema.get("items", {})) for item in value]
    if not isinstance(value, Mapping) or "x-kubernetes-preserve-unknown-fields" in schema:
        return value
    known = schema.get("properties", {})
    return {
        key: as_stored(item, known.get(key, {}))
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
