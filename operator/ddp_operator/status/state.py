"""Everything that one decision looks at, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Status
from ddp_operator.status.decision import Refusal
from ddp_operator.status.observation import Observation, Pods
from ddp_operator.status.views import JobView


@dataclass(frozen=True)
class State:
    """A resource, what is observed of it, and the time. ``refusal``: its spec as it stands cannot be carried out."""

    job: DDPTrainingJob
    observation: Observation
    now: datetime
    refusal: Refusal | None = None

    @property
    def spec(self) -> Spec:
        """What is wanted."""
        return self.job.spec

    @property
    def status(self) -> Status:
        """The ledger, as it was written last."""
        return self.job.status

    @cached_property
    def attempt_job(self) -> JobView | None:
        """The Job of the current attempt."""
        return self.observation.job(self.status.attempt)

    @cached_property
    def pods(self) -> Pods:
        """The pods of the current attempt."""
        return self.observation.pods_of(self.status.attempt)
