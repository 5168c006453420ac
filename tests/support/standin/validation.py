"""Admission of an object: defaults, unknown fields, the schema, CEL rules, and a Job's own rules."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

import jsonschema
import kubernetes_validate
import msgspec

from ddp_operator.api.cel import check_rules
from ddp_operator.features import SCHEMA
from docs.pages.schemas import to_json_schema

from .errors import ApiFailure
from .resources import Kind
from .storage import Object

KUBERNETES = "1.36"
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def admit(
    kind: Kind, obj: Object, old: Object | None, *, strictness: str = "Warn", status_only: bool = False
) -> Object:
    """Return the object as it would be stored. Raises: ApiFailure 400 or 422, with a message like the API server's.

    ``status_only`` skips all other checks, including the CEL rules, which take 0.1 s.
    """
    if kind.schema is not None:
        obj = _admit_custom(kind, obj, strictness, parts=("status",) if status_only and old is not None else None)
        if not status_only:
            _refuse(
                kind, obj, [f"{error.path}: Invalid value: {error.message}" for error in check_rules(obj, SCHEMA, old)]
            )
    elif kind.kind == "Job" and not status_only:
        if strictness == "Strict":
            _refuse_unknown_fields(obj)
        _check_job(kind, obj)
    return obj


def _admit_custom(kind: Kind, obj: Object, strictness: str, *, parts: tuple[str, ...] | None) -> Object:
    """Check and default an object, or some parts of it."""
    schema = _schema_of(kind, parts)
    whole = obj
    unknown = list[str]()
    if parts is not None:
        obj = {name: member for name, member in obj.items() if name in parts}
    obj = _prune(schema, obj, "", unknown)
    if unknown and strictness == "Strict":
        words = ", ".join(f'unknown field "{path}"' for path in unknown)
        where = f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}'
        raise ApiFailure(400, f"{where}: strict decoding error: {words}")
    obj = _default(schema, obj)
    _refuse(kind, whole, list(_find_errors(kind, parts, msgspec.json.encode(obj))))
    return whole | obj if parts else obj | {"metadata": whole["metadata"]}


def _refuse(kind: Kind, obj: Object, errors: list[str]) -> None:
    if errors:
        name = obj["metadata"].get("name", "")
        raise ApiFailure(422, f'{kind.kind}.{kind.group} "{name}" is invalid: {", ".join(errors)}')


@lru_cache(4096)
def _find_errors(kind: Kind, parts: tuple[str, ...] | None, encoded: bytes) -> tuple[str, ...]:
    errors = _validator(kind, parts).iter_errors(msgspec.json.decode(encoded))
    return tuple(f"{_path(error.absolute_path)}: Invalid value: {error.message}" for error in errors)


@cache
def _schema_of(kind: Kind, parts: tuple[str, ...] | None) -> dict[str, Any]:
    assert kind.schema is not None
    if parts is None:
        return kind.schema
    return {"type": "object", "properties": {name: kind.schema["properties"][name] for name in parts}}


@cache
def _validator(kind: Kind, parts: tuple[str, ...] | None) -> Any:
    return jsonschema.Draft202012Validator(to_json_schema(_schema_of(kind, parts)))


def _prune(schema: dict[str, Any], value: Any, path: str, unknown: list[str]) -> Any:
    if isinstance(value, dict) and schema.get("type") == "object":
        properties = schema.get("properties", {})
        extra = schema.get("additionalProperties")
        keeps_unknown = schema.get("x-kubernetes-preserve-unknown-fields")
        result = {}
        for name, item in value.items():
            where = f"{path}.{name}".lstrip(".")
            if not path and name in ("apiVersion", "kind", "metadata"):
                result[name] = item
            elif name in properties:
                result[name] = _prune(properties[name], item, where, unknown)
            elif keeps_unknown:
                result[name] = item
            elif extra:
                result[name] = _prune(extra, item, where, unknown) if isinstance(extra, dict) else item
            else:
                unknown.append(where)
        return result
    if isinstance(value, list) and "items" in schema:
        return [_prune(schema["items"], item, f"{path}[{index}]", unknown) for index, item in enumerate(value)]
    return value


def _default(schema: dict[str, Any], value: Any) -> Any:
    if isinstance(value, dict):
        result = dict(value)
        for name, part in schema.get("properties", {}).items():
            if name not in result and "default" in part:
                result[name] = part["default"]
            if name in result:
                result[name] = _default(part, result[name])
        return result
    if isinstance(value, list) and "items" in schema:
        return [_default(schema["items"], item) for item in value]
    return value


def _path(parts: Any) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _refuse_unknown_fields(obj: Object) -> None:
    try:
        kubernetes_validate.validate(obj, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as exc:
        names = re.findall(r"'([^']+)' (?:was|were) unexpected", exc.message)
        if not names:
            raise ApiFailure(400, f'Job in version "v1" cannot be handled as a Job: {exc.message}') from None
        where = _path([*exc.path, names[0]])
        raise ApiFailure(
            400, f'Job in version "v1" cannot be handled as a Job: strict decoding error: unknown field "{where}"'
        ) from None


def _check_job(kind: Kind, obj: Object) -> None:
    """Some of the rules for a Job's pod template that users break most often."""
    template = obj["spec"].get("template", {}).get("spec", {})
    errors = []
    if template.get("restartPolicy") not in ("Never", "OnFailure"):
        errors.append('spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"')
    containers = template.get("containers") or []
    if not containers:
        errors.append("spec.template.spec.containers: Required value")
    for index, container in enumerate(containers):
        at = f"spec.template.spec.containers[{index}]"
        if not LABEL.fullmatch(str(container.get("name", ""))):
            errors.append(f"{at}.name: Invalid value: {container.get('name', '')!r}: a DNS label is wanted")
        if not container.get("image"):
            errors.append(f"{at}.image: Required value")
        volumes = {volume.get("name") for volume in template.get("volumes") or []}
        for number, mount in enumerate(container.get("volumeMounts") or []):
            if mount.get("name") not in volumes:
                errors.append(f'{at}.volumeMounts[{number}].name: Not found: "{mount.get("name")}"')
    if errors:
        raise ApiFailure(422, f'Job.batch "{obj["metadata"].get("name")}" is invalid: {", ".join(errors)}')


def default_builtin(kind: Kind, obj: Object) -> None:
    """Set those defaults of the API server that tests read."""
    if kind.kind == "Job":
        uid = obj["metadata"]["uid"]
        name = obj["metadata"]["name"]
        spec = obj["spec"]
        labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
        labels |= {"batch.kubernetes.io/controller-uid": uid, "batch.kubernetes.io/job-name": name}
        labels |= {"controller-uid": uid, "job-name": name}
        spec.setdefault("selector", {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}})
        for field, value in {"parallelism": 1, "completions": 1, "backoffLimit": 6, "suspend": False}.items():
            spec.setdefault(field, value)
        obj["status"] = {}
    elif kind.kind == "Pod":
        obj.setdefault("status", {}).setdefault("phase", "Pending")
    elif kind.kind == "Namespace":
        obj.setdefault("status", {"phase": "Active"})
