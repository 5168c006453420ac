"""Structural schemas of structs. They have neither ``$ref`` nor ``anyOf`` over types, so all types are inlined."""

import inspect
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as mi

from ddp_operator.api.status import OPAQUE

_SCALARS = {mi.IntType: "integer", mi.FloatType: "number", mi.StrType: "string", mi.BoolType: "boolean"}


def build_schema(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the structural schema of a struct, with its descriptions and defaults at every level."""
    return _convert(mi.type_info(cls))


@cache
def document_of(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the same, shared by all callers. Do not change it."""
    return build_schema(cls)


def _convert(info: mi.Type) -> dict[str, Any]:
    if isinstance(info, mi.Metadata):
        schema = _convert(info.type)
        schema.update(info.extra_json_schema or {})
        if OPAQUE in schema:
            schema.pop("properties", None)
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
        # The API server checks types of Kubernetes, such as a pod's spec, in the dry run. The schema has no type: for
        # an object with unknown members, == in CEL would compare the number of members and only the common ones.
        return {OPAQUE: True}
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
            # With an empty object here the API server fills in the defaults of the level below.
            child["default"] = {}
        elif field.required:
            required.append(field.encode_name)
        properties[field.encode_name] = child
    schema["properties"] = properties
    if required:
        schema["required"] = required
    return schema


def without_defaults(schema: Any) -> Any:
    """Return a copy without ``default``: a default in the status would look like an observation."""
    if not isinstance(schema, dict):
        return schema
    return {name: without_defaults(value) for name, value in schema.items() if name != "default"}
