"""What an API server with the operator would say about a file, said without one.

``ddp render`` and ``ddp run`` both begin here: the CRD's schema, defaults and CEL rules, then the operator's own checks
of the pod template, then Kubernetes' schemas of the objects to be created where kubernetes-validate is installed.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ddp_operator.api.claims import assume_claimed, count_claimed, find_claims, is_counted
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.parse import FindProfile, Manifest, find_among, find_none, parse_manifest
from ddp_operator.api.pod_fields import find_unknown_fields, unknown_field
from ddp_operator.api.status import ClaimedGpus
from ddp_operator.constants import POD_GROUP
from ddp_operator.manifests.children import PLACEHOLDER_UID, build_children

# The oldest Kubernetes that the operator supports; what it takes, newer ones take too.
_KUBERNETES = "1.31"


def check_manifest(
    text: str, code: Mapping[str, Any] | None = None, profiles: FindProfile = find_none, *, exact: bool = False
) -> Manifest:
    """Return the manifest in ``text``, with what the operator would create for it. Raises: InvalidManifest.

    ``code``: where its spec.code is to come from. ``profiles``: finds profiles that the file does not have. ``exact``:
    the GPUs of resource claims are counted, by those in the file; else they are as many as the spec needs.
    """
    manifest = parse_manifest(text, code, profiles)
    unknown = find_unknown_fields(manifest.job.spec.template.spec)
    if unknown:
        raise InvalidManifest(unknown)
    gpus = _count_claimed(manifest) if exact else assume_claimed(manifest.job.spec)
    claims = ClaimedGpus(gpus=gpus, digest="") if find_claims(manifest.job.spec) else None
    status = msgspec.structs.replace(manifest.job.status, claims=claims)
    manifest = dataclasses.replace(manifest, job=dataclasses.replace(manifest.job, status=status))
    job = dataclasses.replace(manifest.job, uid=manifest.job.uid or PLACEHOLDER_UID)
    fetch = build_children(job, attempt=0, nodes=0)[-1:] if job.spec.inputs else []
    children = [*fetch, *build_children(job, attempt=1, nodes=job.spec.nodes)]
    errors = list(_check_schemas(children))
    if errors:
        raise InvalidManifest(errors)
    return dataclasses.replace(manifest, children=tuple(children))


def _count_claimed(manifest: Manifest) -> int:
    """Return the GPUs that each pod claims. Raises: InvalidManifest where the file does not tell."""
    spec, find, found = manifest.job.spec, find_among(manifest.others), []
    for one in find_claims(spec):
        raw = find(one.kind, "", one.name)
        if raw is not None:
            found.append((one, raw))
        elif is_counted(spec):
            words = f"cannot be known without a cluster, as {one.kind} {one.name} is not in the file"
            remedy = "add it to the file, or set this to a number"
            raise InvalidManifest([FieldError("spec.procPerNode", f"{words}; {remedy}", spec.proc_per_node)])
    return count_claimed(spec, found)


def _check_schemas(children: Iterable[Mapping[str, Any]]) -> Iterator[FieldError]:
    try:
        import kubernetes_validate
    except ImportError:
        return
    for child in children:
        if child["kind"] == POD_GROUP:
            continue  # no kind of Kubernetes' own
        try:
            kubernetes_validate.validate(dict(child), _KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield from _explain(error)


def _explain(error: Any) -> Iterator[FieldError]:
    """Name the fields as the API server does. A Job's ``spec.template`` lies where the resource's own does."""
    path = ""
    for step in error.path:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    unknown = re.search(r"\((.*) (was|were) unexpected\)", error.message)
    if unknown:
        yield from (unknown_field(f"{path}.{name}") for name in re.findall("'(.*?)'", unknown[1]))
        return
    yield FieldError(path, f"{error.message.splitlines()[0][:300]}; see `kubectl explain` for this field")
