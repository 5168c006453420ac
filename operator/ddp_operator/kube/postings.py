"""How API servers take the objects of features. A fault of a feature refuses its object, or leaves out a remedy."""

from collections.abc import Sequence
from functools import partial

from ddp_operator.api.cluster import Object
from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.posting import Posting, describe_absence
from ddp_operator.decide.hooks import Feature, guard_object, name_fault


class Postings:
    """The hooks ``posting`` of all features."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._features = features

    def find(self, manifest: Object) -> tuple[str, Posting] | None:
        """Return the feature that owns the kind of an object, with its hook; None: the kind is one of the kernel's."""
        for feature in self._features:
            if feature.posting is not None and feature.posting.kind == manifest["kind"]:
                return feature.name, feature.posting
        return None

    def list_versions(self, manifest: Object) -> Sequence[Object]:
        """Return a child in each API version to try, the newest first. Raises: Refused, after a fault."""
        found = self.find(manifest)
        if found is None:
            return [manifest]
        name, posting = found
        none: Sequence[Object] = ()
        call = partial(posting.list_versions, manifest)
        versions = guard_object(manifest).call(name, "list_versions", call, list[Object], default=none, is_valid=bool)
        if not versions:
            raise Refused(name_fault(name).message, reason="Invalid")
        return versions

    def explain_loss(self, posted: Object, created: Object) -> str:
        """Return what the API server dropped of a child, or a fault, so that the child is refused; empty: nothing."""
        found = self.find(posted)
        if found is None:
            return ""
        name, posting = found
        call = partial(posting.explain_loss, posted, created)
        fault = name_fault(name).message
        return guard_object(posted).call(name, "explain_loss", call, str, default=fault)

    def explain_absence(self, manifest: Object) -> str:
        """Return the refusal of a child of which the API server serves no version."""
        text = describe_absence(manifest)
        found = self.find(manifest)
        if found is None:
            return text
        name, posting = found
        call = partial(posting.explain_absence, manifest)
        return guard_object(manifest).call(name, "explain_absence", call, str, default=text)

    def explain_refusal(self, manifest: Object, message: str) -> str:
        """Return the API server's refusal of a child, with the remedies of features."""
        guard = guard_object(manifest)
        for feature in self._features:
            if feature.posting is not None:
                call = partial(feature.posting.explain_refusal, manifest, message)
                message = guard.call(feature.name, "explain_refusal", call, str, default=message)
        return message
