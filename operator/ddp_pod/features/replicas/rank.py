"""The samples of a rank's replicas."""

from ...rank.part import RankPart
from .sampler import ReplicaSampler

PART = RankPart(sample=ReplicaSampler)
