"""The rank's run in experiment trackers."""

from ...rank.part import RankPart
from .runs import set_rank_variables

PART = RankPart(prepare=set_rank_variables)
