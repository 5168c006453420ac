"""From YAML or JSON to typed values; every refusal names the field and the remedy.

``parse_resource`` is what the operator does with an object that the API server has already validated.
``parse_manifest`` does the API server's part as well (schema, defaults, CEL rules), for tools that work without one.
"""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import yaml

from ddp_operator import constants
from ddp_operator.api.crd import build_schema, build_spec_schema
from ddp_operator.api.errors import FieldError, InvalidManifest, check_strings, unknown_member
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.profile import complete_spec, profile_reference, read_profile
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Status


@dataclass(frozen=True, slots=True)
class Manifest:
    """One file: the training job with its defaults, and the other objects that came with it (ConfigMaps, …)."""

    job: DDPTrainingJob
    resource: Mapping[str, Any]
    others: tuple[Mapping[str, Any], ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict)
    """The job as the file has it, without defaults."""
    completed: Mapping[str, Any] = field(default_factory=dict)
    """The spec as the file and its profile have it, without defaults."""
    children: tuple[Mapping[str, Any], ...] = ()
    """The children of its first attempt in the order of creation, once that has been checked too."""


def parse_status(raw: Mapping[str, Any]) -> Status:
    """Return a resource's status. An unreadable one counts as none: the next pass writes it anew."""
    try:
        return msgspec.convert(raw.get("status") or {}, Status)
    except msgspec.ValidationError:
        return Status()


def parse_resource(raw: Mapping[str, Any], spec: Spec | None = None, locked: tuple[str, ...] = ()) -> DDPTrainingJob:
    """Return the typed resource.

    ``spec``: what has been made of this generation's already; ``locked``: what the job's profile locks.

    Raises: InvalidManifest.
    """
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
        spec=spec or _parse_spec(raw.get("spec")),
        status=parse_status(raw),
        locked=locked,
    )


FindProfile = Callable[[str, str, str], Mapping[str, Any] | None]
"""Returns a profile by its kind, the namespace that the job names, if any, and its name."""


def find_none(kind: str, namespace: str, name: str) -> None:
    """Return None: no profile is known."""


def find_among(documents: Iterable[Mapping[str, Any]], otherwise: FindProfile = find_none) -> FindProfile:
    """Return what finds profiles among these objects, whatever their namespaces."""
    found = {(one.get("kind"), (one.get("metadata") or {}).get("name")): one for one in documents}
    return lambda kind, namespace, name: found.get((kind, name)) or otherwise(kind, namespace, name)


def parse_manifest(text: str, code: Mapping[str, Any] | None = None, profiles: FindProfile = find_none) -> Manifest:
    """Return the one training job in a YAML file (which may hold other objects too), fully checked offline.

    ``code``: what its spec.code is to be, but for what only the file says there (mountPath).
    Its profile is looked for in the file, then by ``profiles``.

    Raises: InvalidManifest.
    """
    documents = load_documents(text)
    ours = [d for d in documents if d.get("kind") == constants.KIND]
    if len(ours) != 1:
        kinds = {str(d.get("kind")) for d in documents}
        found = ", ".join(sorted(kinds)) or "nothing"
        problem = "no" if not ours else f"{len(ours)} objects of"
        convertible = "PyTorchJob" in kinds and not ours
        remedy = "convert the PyTorchJob with `ddp convert`" if convertible else "it must have exactly one"
        words = f"the file has {problem} kind {constants.KIND} (found: {found}); {remedy}"
        raise InvalidManifest([FieldError("kind", words)])
    raw = ours[0]
    if raw.get("apiVersion") != constants.API_VERSION:
        words = f"must be {constants.API_VERSION}; change it"
        raise InvalidManifest([FieldError("apiVersion", words, raw.get("apiVersion"))])
    _check_shape(raw)
    others = tuple(d for d in documents if d is not raw)
    if code is not None and isinstance(raw.get("spec"), Mapping):
        kept = {name: value for name, value in (raw["spec"].get("code") or {}).items() if name in ("mountPath", "pip")}
        raw = {**raw, "spec": {**raw["spec"], "code": {**kept, **code}}}
    own = _as_stored(raw.get("spec"), _spec_schema())
    completed, locked = _complete(raw, own, find_among(others, profiles))
    job = parse_resource(dict(raw) | {"spec": completed}, locked=locked)
    spec = msgspec.json.decode(msgspec.json.encode(job.spec))
    from ddp_operator.api.cel import check_rules  # needs cel-expr-python, which the operator's image does not carry

    # The API server is given the job as it is written, the operator then asks it about the whole.
    for part in (own, spec) if job.spec.profile_ref else (spec,):
        errors = check_rules(dict(raw) | {"spec": _with_defaults(part, build_spec_schema())})
        if errors:
            raise InvalidManifest(errors)
    resource = dict(raw) | {"spec": _with_defaults(spec, _spec_schema())}
    return Manifest(job, resource, others, dict(raw) | {"spec": own}, completed)


def _complete(raw: Mapping[str, Any], own: Any, profiles: FindProfile) -> tuple[Any, tuple[str, ...]]:
    """Return the spec of a manifest with its profile, and what that locks. Raises: InvalidManifest."""
    reference = profile_reference(raw)
    if reference is None:
        return own, ()
    kind, name = reference
    found = profiles(kind, raw["metadata"].get("namespace") or "", name)
    if found is None:
        words = f"there is no {kind} {name}; create it, give a file that has it with --profiles, or correct the name"
        raise InvalidManifest([FieldError("spec.profileRef", words)])
    profile = read_profile(found)
    spec, errors = complete_spec(own, profile)
    if errors:
        raise InvalidManifest(errors)
    return spec, profile.locked


def _check_shape(raw: Mapping[str, Any]) -> None:
    """Check what lies outside spec: the API server's object meta and unknown top-level fields."""
    below = {name: f"it belongs below spec: spec.{name}" for name in _SPEC}
    unknown = [str(name) for name in raw if name not in _TOP_LEVEL]
    errors = [unknown_member(name, "", _TOP_LEVEL, belongs=below.get(name, "")) for name in unknown]
    metadata = raw.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if metadata is not None and not isinstance(metadata, Mapping):
        errors.append(FieldError("metadata", "must be an object with a name"))
    elif name is not None and not isinstance(name, str):
        errors.append(FieldError("metadata.name", "must be a string; quote it", name))
    elif not name:
        errors.append(FieldError("metadata.name", "Required value: add a name"))
    elif isinstance(metadata, Mapping):
        errors += [unknown_member(str(name), "metadata", _METADATA) for name in metadata if name not in _METADATA]
        checked = (check_strings(metadata.get(part), f"metadata.{part}") for part in ("labels", "annotations"))
        errors += filter(None, checked)
        namespace = metadata.get("namespace")
        if namespace is not None and not isinstance(namespace, str):
            errors.append(FieldError("metadata.namespace", "must be a string", namespace))
    if errors:
        raise InvalidManifest(errors)


_CONTAINER = "spec.template.spec.containers"
# What other operators and torchrun call it, or where Kubernetes has it: field of spec -> what to write instead.
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
_SPEC = frozenset(field.encode_name for field in msgspec.structs.fields(Spec))
_TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec", "status")
# ObjectMeta of Kubernetes; those a user writes come first.
_METADATA = (
    *("name", "namespace", "labels", "annotations", "generateName", "finalizers", "ownerReferences"),
    *("creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "generation", "managedFields"),
    *("resourceVersion", "selfLink", "uid"),
)


def _parse_spec(raw: Any) -> Spec:
    if raw is None:
        raise InvalidManifest([FieldError("spec", "Required value: add spec with at least spec.template")])
    try:
        return msgspec.convert(_as_stored(raw, _spec_schema()), Spec)
    except msgspec.ValidationError as error:
        raise InvalidManifest([_explain(str(error))]) from None


def _as_stored(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a value as the API server stores it: without nulls, 2.0 as 2. What Kubernetes defines is left alone."""
    if isinstance(value, int | float) and not -(2**63) <= value < 2**63:
        return math.inf  # no integer of 64 bits: a number of another type, and not finite so that it stays one
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
        if item is not None or key not in known  # kubectl refuses an unknown field also where it is null
    }


@cache
def _spec_schema() -> dict[str, Any]:
    return build_schema(Spec)


def _explain(text: str) -> FieldError:
    """Turn msgspec's sentence into ours."""
    match = re.fullmatch(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", text, re.DOTALL)
    assert match
    path = "spec" + (match["path"] or "")
    what = match["what"]
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    if unknown:
        known = tuple(_schema_at(path).get("properties", ()))
        return unknown_member(unknown[1], path, known, belongs=_ELSEWHERE.get(unknown[1], "") if path == "spec" else "")
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing:
        return FieldError(f"{path}.{missing[1]}", "Required value: it has no default; add it")
    wrong_type = re.fullmatch(r"Expected `(.*)`, got `(.*)`", what)
    if wrong_type:
        wanted, got = _json_type(wrong_type[1].replace(" | null", "")), _json_type(wrong_type[2])
        words = f'{path} in body must be of type {wanted}: "{got}"'  # as the API server says it
        return FieldError(path, f"{words}; {_remedy(wanted, path)}", got)
    wrong_choice = re.fullmatch(r"Invalid enum value '?(.*?)'?", what)
    if wrong_choice:
        allowed = ", ".join(f'"{choice}"' for choice in _schema_at(path).get("enum", ()))
        return FieldError(path, f'Unsupported value: "{wrong_choice[1]}": supported values: {allowed}')
    return FieldError(path, what)


def _remedy(wanted: str, path: str) -> str:
    """Return how to write a value of that type."""
    if wanted == "object" and (members := _schema_at(path).get("properties")):
        return f"write its fields below it: {', '.join(members)}"
    return _REMEDIES.get(wanted, "write one")


_REMEDIES = {
    "integer": "write a whole number, without quotes",
    "boolean": "write true or false, without quotes",
    "string": "quote it",
    "array": "write a list: [a, b], or one line with '- ' for each item",
    "object": "write its fields below it",
}
_JSON_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}


def _json_type(text: str) -> str:
    return re.sub(r"\b(int|float|str|bool)\b", lambda m: _JSON_TYPES[m[0]], text)


def _schema_at(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"properties": {"spec": _spec_schema()}}
    for name in re.sub(r"\[.*?\]", "", path).split("."):
        schema = schema.get("properties", {}).get(name, {})
        schema = schema.get("items", schema)
    return schema


def _with_defaults(value: Any, schema: Mapping[str, Any]) -> Any:
    """Fill in defaults as the API server does, at every level that is present or has a default itself."""
    if not isinstance(value, Mapping) or "properties" not in schema:
        return value
    filled = dict(value)
    for name, child in schema["properties"].items():
        if name not in filled and "default" in child:
            filled[name] = child["default"]
        if name in filled:
            filled[name] = _with_defaults(filled[name], child)
    return filled


_MOST_TEXT = 16 << 20  # characters of a file; the API server takes 3 MiB of one object
_MOST_NODES = 200_000
_MOST_CHARACTERS = 32 << 20
_MOST_DEPTH = 100


def _refuse_expansion() -> InvalidManifest:
    words = (
        f"not valid YAML: expands to more than {_MOST_NODES} values, {_MOST_CHARACTERS >> 20} MiB or {_MOST_DEPTH} "
        "levels; write it with fewer aliases (*name), or split it"
    )
    return InvalidManifest([FieldError("the file", words)])


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys silently; kubectl refuses them, so we do.

    What aliases and merges expand to is bounded for the whole file: a node counts each time that it is referred to.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0
        self._nodes = 0
        self._expanded: dict[int, tuple[int, int]] = {}  # nodes and characters by the identity of a node
        self._nodes_left = _MOST_NODES
        self._characters_left = _MOST_CHARACTERS

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read a node, which may be an alias. Raises: InvalidManifest."""
        self._depth += 1
        self._nodes += 1
        if self._depth > _MOST_DEPTH or self._nodes > _MOST_NODES:
            raise _refuse_expansion()
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_document(self) -> Any:
        """Read a document, and count what it expands to. Raises: InvalidManifest."""
        self._expanded = {}
        document = super().compose_document()
        nodes, characters = self._measure(document)
        self._nodes_left -= nodes
        self._characters_left -= characters
        if self._nodes_left < 0 or self._characters_left < 0:
            raise _refuse_expansion()
        return document

    def _measure(self, node: Any) -> tuple[int, int]:
        """Return how many nodes and characters a node expands to. Its depth is bounded already."""
        known = self._expanded.get(id(node))
        if known is not None:
            return known
        if isinstance(node, yaml.ScalarNode):
            return 1, len(node.value)
        self._expanded[id(node)] = (_MOST_NODES + 1, 0)  # an alias to a node around it never ends
        nodes = 1
        characters = 0
        for item in node.value:
            for member in item if isinstance(item, tuple) else (item,):
                more = self._measure(member)
                nodes += more[0]
                characters += more[1]
        self._expanded[id(node)] = nodes, characters
        return nodes, characters

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = f"line {key_node.start_mark.line + 1}"
            if not isinstance(key, str):
                raise InvalidManifest([FieldError(line, f"the key {key!r} is not a string; quote it")])
            if key in seen and key != "<<":
                raise InvalidManifest([FieldError(line, f'key "{key}" is duplicated; remove one')])
            seen.add(key)
        return super().construct_mapping(node, deep)


# kubectl hands an unquoted date on as the text it is; so do we.
_UniqueKeyLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_documents(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML file, as kubectl would read them. Raises: InvalidManifest."""
    if len(text) > _MOST_TEXT:
        words = f"has more than {_MOST_TEXT >> 20} MiB; give the path of a manifest, and keep data elsewhere"
        raise InvalidManifest([FieldError("the file", words)])
    try:
        documents = [d for d in yaml.load_all(text, Loader=_UniqueKeyLoader) if d is not None]
    except InvalidManifest:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"
        problem = getattr(error, "problem", None) or "is no YAML"
        raise InvalidManifest([FieldError(where, f"not valid YAML: {problem}; fix the file there")]) from None
    except (ValueError, RecursionError, UnicodeError) as error:
        raise InvalidManifest([FieldError("the file", f"not valid YAML: {error}")]) from None
    for document in documents:
        if not isinstance(document, dict):
            words = "contains something that is not a Kubernetes object; remove it, or give the path of a job's YAML"
            raise InvalidManifest([FieldError("the file", words)])
    return documents
