"""Parse the resource, which an API server has validated, into typed values. Every refusal names the field.

Without an API server a wrong job is refused in this order: the text of a file by ``documents``, the size by ``size``,
names and types by ``written``, values and combinations by ``rules``, the pod template by ``manifests/template`` and
the feature ``early_checks``. In a cluster the CRD (``crd``, with the same rules) refuses names, types, values and
combinations at `kubectl apply`; the operator's ``reconciler._parse_job`` what is stored nevertheless,
``executor.check`` the template, and a refusal of the children by the API server becomes the condition Accepted. A
feature has the rules and checks of its fields in its folder.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parts import SpecSchema
from ddp_operator.api.size import refuse_oversize
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Status
from ddp_operator.api.stored_fields import read_status


def parse_status(raw: Mapping[str, Any]) -> Status:
    """Return the status of a resource without the fields that cannot be read; the next pass overwrites them."""
    return read_status(raw).status


def parse_resource(raw: Mapping[str, Any], schema: SpecSchema) -> DDPTrainingJob:
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
        former=schema.list_former(raw.get("spec")),
    )


def _parse_spec(raw: Any, schema: SpecSchema) -> Spec:
    if raw is None:
        raise InvalidManifest([FieldError("spec", "Required value: add spec with at least spec.template")])
    refuse_oversize(raw)
    try:
        return msgspec.convert(schema.take_over(raw), schema.spec)
    except msgspec.ValidationError as error:
        problem, path = split_problem(str(error))
        raise InvalidManifest([FieldError(path, problem)]) from error


def split_problem(text: str) -> tuple[str, str]:
    """Return the problem in a message of msgspec, and the path of its field."""
    match = re.fullmatch(r"(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?", text, re.DOTALL)
    assert match
    path = "spec" + (match["path"] or "")
    missing = re.fullmatch(r"Object missing required field `(.*)`", match["problem"])
    if missing:
        return "Required value: it has no default; add it", f"{path}.{missing[1]}"
    return match["problem"], path
