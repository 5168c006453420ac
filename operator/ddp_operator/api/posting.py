"""What a feature knows of how API servers take its objects. ``kube/postings`` calls it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_operator.api.cluster import Object


def describe_absence(manifest: Object) -> str:
    """Return the refusal of an object of which the API server serves no version."""
    return f"the cluster does not serve {manifest['kind']} of {manifest['apiVersion']}"


def _as_it_is(manifest: Object) -> Sequence[Object]:
    return [manifest]


def _find_no_loss(posted: Object, created: Object) -> str:
    return ""


def _repeat(manifest: Object, message: str) -> str:
    return message


@dataclass(frozen=True, slots=True)
class Posting:
    """How an API server takes a feature's objects of a kind that it may serve in another version, or not at all.

    ``kind``: empty, if it has none and explains refusals of the kernel's objects. ``explain_absence``: the refusal if
    it serves none of ``list_versions``, the object in each version, the newest first. ``explain_loss``: takes the
    posted and the stored object, and returns what was dropped, with the remedy; empty: nothing. ``explain_refusal``:
    takes any child of a job and its refusal by the API server, and returns that, with the remedy if this feature knows
    it.
    """

    kind: str = ""
    explain_absence: Callable[[Object], str] = describe_absence
    list_versions: Callable[[Object], Sequence[Object]] = _as_it_is
    explain_loss: Callable[[Object, Object], str] = _find_no_loss
    explain_refusal: Callable[[Object, str], str] = _repeat
