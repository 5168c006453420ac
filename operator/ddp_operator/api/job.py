"""The whole resource as the rest of the operator sees it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ddp_operator import constants
from ddp_operator.api.limits import IN_PLACE_RESTARTS
from ddp_operator.api.rules import ONCE_RUN
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Status


@dataclass(frozen=True, slots=True)
class DDPTrainingJob:
    """A parsed ``DDPTrainingJob``: identity, typed spec, typed status."""

    name: str
    namespace: str
    spec: Spec
    status: Status = field(default_factory=Status)
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    deleting: bool = False
    created: str = ""

    @property
    def in_place_restarts(self) -> int:
        """How often torchrun restarts the workers itself: the spec's value, else 2 where the rendezvous allows it."""
        asked = self.spec.recovery.in_place_restarts
        if asked is not None:
            return asked
        return 0 if self.spec.rendezvous.backend == "static" else IN_PLACE_RESTARTS

    @property
    def spec_digest(self) -> str:
        """A digest of the fields of the spec by which a Job is replaced where they change before a pod has run."""
        fields = msgspec.to_builtins(self.spec)
        kept = {name: fields[name] for name in ONCE_RUN if name in fields}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def owner_reference(job: DDPTrainingJob, *, controller: bool = True) -> dict[str, Any]:
    """Return the owner reference that every child carries, so that deletion works with the operator down."""
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": controller,
        "blockOwnerDeletion": False,
    }


def kueue_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that are Kueue's."""
    return {k: v for k, v in labels.items() if k.startswith(constants.KUEUE_LABEL_PREFIX)}
