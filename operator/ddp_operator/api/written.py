"""Parse a resource as users write it, which no API server has validated. Every refusal names field and remedy."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parse import parse_resource, split_problem
from ddp_operator.api.schema import Schema
from ddp_operator.api.size import refuse_oversize
from ddp_operator.api.structural import document_of

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


def parse_written(raw: Mapping[str, Any], schema: Schema) -> DDPTrainingJob:
    """Return the typed resource. Raises: InvalidManifest."""
    refuse_oversize(raw.get("spec"))
    document = document_of(schema.spec)
    try:
        return parse_resource({**raw, "spec": as_stored(schema.take_over(raw.get("spec")), document)}, schema)
    except InvalidManifest as refused:
        if not isinstance(refused.__cause__, msgspec.ValidationError):
            raise
        raise InvalidManifest([_explain(str(refused.__cause__), document)]) from None


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
    problem, path = split_problem(text)

    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", problem)
    if unknown:
        name = unknown[1]
        known = tuple(_schema_at(path, schema).get("properties", ()))
        remedy = _ELSEWHERE.get(name, "") if path == "spec" else ""
        return unknown_member(name, path, known, belongs=remedy)

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


def unknown_member(name: str, parent: str, known: Sequence[str], *, belongs: str = "") -> FieldError:
    """Return the refusal of a field that is not among the known members of ``parent``.

    ``belongs``: the remedy, if it is known. Otherwise the remedy is the most similar member, or a list of all members.
    """
    full = f"{parent}.{name}" if parent else name
    similar = difflib.get_close_matches(name, known, n=1)
    if belongs:
        remedy = belongs
    elif similar:
        remedy = f"did you mean {similar[0]}?"
    else:
        remedy = f"known fields: {', '.join(known)}"
    return FieldError("", f'unknown field "{full}"; {remedy}')
