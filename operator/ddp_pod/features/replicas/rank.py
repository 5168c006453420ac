"""The samples of a rank's replicas."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...rank.part import RankPart, StepSampler

if TYPE_CHECKING:
    from ...rank.losses import LossReader


def _sample(torch: Any, find_slot: Callable[[], Any], losses: "LossReader") -> StepSampler:
    from .sampler import ReplicaSampler  # a rank without an optimizer does not compile it

    return ReplicaSampler(torch, find_slot, losses)


PART = RankPart(sample=_sample)
