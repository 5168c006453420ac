"""Structural OpenAPI schemas (the CRD dialect) from msgspec structs.

Kubernetes takes no ``$ref`` and no ``anyOf`` over types, so this walks the types itself and inlines everything.
Reference: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
"""

import inspect
from typing import Any

import msgspec
from msgspec import inspect as mi

_SCALARS: dict[type[mi.Type], str] = {
    mi.IntType: "integer",
    mi.FloatType: "number",
    mi.StrType: "string",
    mi.BoolType: "boolean",
}


def build_schema(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the structural schema of a struct, with descriptions and with defaults at every level that has any."""
    return _convert(mi.type_info(cls))


def _convert(info: mi.Type) -> dict[str, Any]:
    if isinstance(info, mi.Metadata):
        schema = _convert(info.type)
        schema.update(info.extra_json_schema or {})
        return schema
    if isinstance(info, mi.StructType):
        return _convert_struct(info)
    if isinstance(info, mi.UnionType):
        return _convert_union(info)
    if isinstance(info, mi.LiteralType):
        return {"type": "string", "enum": list(info.values)}
    if isinstance(info, mi.VarTupleType | mi.ListType):
        return {"type": "array", "items": _convert(info.item_type)}
    if isinstance(info, mi.AnyType):
        # Kubernetes' own types (a pod's spec) are not repeated here: the API server checks them at dry-run. No type is
        # given either: of an object whose members it does not know, the API server's == in CEL compares the number, and
        # the values only of those that both sides have.
        return {"x-kubernetes-preserve-unknown-fields": True}
    if isinstance(info, mi.DateTimeType):
        return {"type": "string", "format": "date-time"}
    return {"type": _SCALARS[type(info)]}


def _convert_union(info: mi.UnionType) -> dict[str, Any]:
    members = [member for member in info.types if not isinstance(member, mi.NoneType)]
    if len(members) == 1:
        return _convert(members[0])
    assert {type(member) for member in members} == {mi.IntType, mi.StrType}, f"no structural schema for {members}"
    return {"x-kubernetes-int-or-string": True}


def _convert_struct(info: mi.StructType) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if info.cls.__doc__:
        schema["description"] = " ".join(inspect.cleandoc(info.cls.__doc__).split())
    properties: dict[str, Any] = {}
    required: list[str] = []
    for field in info.fields:
        child = _convert(field.type)
        if field.default is not msgspec.NODEFAULT:
            if field.default is not None:
                child["default"] = msgspec.json.decode(msgspec.json.encode(field.default))
        elif field.default_factory is not msgspec.NODEFAULT:
            # An empty object here lets the API server fill in the defaults of the level below.
            child["default"] = {}
        elif field.required:
            required.append(field.encode_name)
        properties[field.encode_name] = child
    schema["properties"] = properties
    if required:
        schema["required"] = required
    return schema


def without_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without ``default`` (status is written whole; a default there would invent facts)."""
    out: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "properties":
            out[name] = {key: without_defaults(child) for key, child in value.items()}
        elif name == "items":
            out[name] = without_defaults(value)
        elif name != "default":
            out[name] = value
    return out
