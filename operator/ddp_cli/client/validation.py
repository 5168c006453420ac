"""Validate a file as an API server and the operator do, without a cluster.

``ddp render`` and ``ddp run`` check the CRD's schema, defaults and CEL rules, then the operator's own rules for the pod
template, then, if kubernetes-validate is installed, the children against the schemas of Kubernetes.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ddp_cli.client.errors import warn_of_deprecated
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.job_file import FindObject, Manifest, find_none, parse_manifest
from ddp_operator.api.pod_fields import find_unknown_fields, unknown_field
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.children import build_children

# The newest with a schema: older versions accept fewer fields, and their API server names the others.
_KUBERNETES = "1.37"


_PLACEHOLDER_UID = "00000000-0000-0000-0000-000000000000"
"""UID of an object that no API server has stored."""


def check_manifest(text: str, code: Mapping[str, Any] | None = None, profiles: FindObject = find_none) -> Manifest:
    """Return the manifest in ``text``, with the children of its first attempt. Raises: InvalidManifest.

    ``code``: replaces spec.code. ``profiles``: finds profiles that are not in the file. Warns of deprecated fields.
    """
    manifest = parse_manifest(text, SCHEMA, code, profiles)
    warn_of_deprecated(manifest.deprecated)
    unknown = find_unknown_fields(manifest.job.spec.template.spec)
    if unknown:
        raise InvalidManifest(unknown)
    job = dataclasses.replace(manifest.job, uid=manifest.job.uid or _PLACEHOLDER_UID)
    is_prepared = SCHEMA.find_preparing(job.spec) is not None
    first = build_children(job, attempt=0, nodes=0)[-1:] if is_prepared else []
    children = [*first, *build_children(job, attempt=1, nodes=job.spec.nodes)]
    errors = list(_check_schemas(children))
    if errors:
        raise InvalidManifest(errors)
    return dataclasses.replace(manifest, children=tuple(children))


def _check_schemas(children: Iterable[Mapping[str, Any]]) -> Iterator[FieldError]:
    try:
        import kubernetes_validate
    except ImportError:
        return
    for child in children:
        if not is_of_kubernetes(child):
            continue  # a custom resource
        try:
            kubernetes_validate.validate(dict(child), _KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield from _explain(error)


def _explain(error: Any) -> Iterator[FieldError]:
    """Yield refusals with the API server's field names. A Job and the resource both have ``spec.template``."""
    path = ""
    for step in error.path:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    unknown = re.search(r"\((.*) (was|were) unexpected\)", error.message)
    if unknown:
        yield from (unknown_field(f"{path}.{name}") for name in re.findall("'(.*?)'", unknown[1]))
        return
    yield FieldError(path, f"{error.message.splitlines()[0][:300]}; see `kubectl explain` for this field")


def is_of_kubernetes(manifest: Mapping[str, Any]) -> bool:
    """Return whether the kind of an object is one of Kubernetes itself, which reserves the groups below k8s.io."""
    group = str(manifest["apiVersion"]).rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")
