"""A value conforms to a declared type with all that it contains."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from ddp_operator.api.cluster import Object
from ddp_operator.api.conforms import conforms
from ddp_operator.api.status import QueueStatus
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.state import DeleteResource, Problem, Remark, SuspendResource, Suspicion

SUSPICION = Suspicion(datetime(2026, 1, 1, tzinfo=UTC), "no answer", is_lost=False)
ODD_STATUS: Any = "Perhaps"
ODD_TEXT: Any = 7
ODD_ACTION: Any = DeleteResource()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, None),
        (None, Fact | None),
        (Fact("A", "True", "R"), Fact | None),
        (0.0, float),
        (3, float | None),
        (True, bool),
        ({"pod": SUSPICION}, Mapping[str, Suspicion]),
        (frozenset({"a"}), frozenset[str]),
        ([{"kind": "Job", "spec": None}], list[Object]),
        (Remark(Fact("A", "True", "R"), (SuspendResource(),), 1.0), Remark),
        (Problem("a", "b"), Problem),
        (QueueStatus(cluster_queue="gpu", position=1, of=2), QueueStatus),
    ],
)
def test_value_of_its_type_conforms(value: Any, kind: Any) -> None:
    assert conforms(value, kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (0, None),
        (object(), Fact | None),
        (Fact("A", ODD_STATUS, "R"), Fact),
        (Fact("A", "True", ODD_TEXT), Fact),
        (True, float),
        (-1.0, float),
        (math.nan, float),
        (math.inf, float),
        ({7: SUSPICION}, Mapping[str, Suspicion]),
        ({"pod": SUSPICION._replace(message=ODD_TEXT)}, Mapping[str, Suspicion]),
        ({"a"}, frozenset[str]),
        (frozenset({7}), frozenset[str]),
        ([7], list[Object]),
        (Remark(actions=(ODD_ACTION,)), Remark),
        (("a", "b"), Problem),
    ],
)
def test_value_with_a_part_of_another_type_does_not_conform(value: Any, kind: Any) -> None:
    assert not conforms(value, kind)


def test_struct_that_an_api_server_would_refuse_raises() -> None:
    with pytest.raises(msgspec.ValidationError):
        conforms(QueueStatus(cluster_queue="gpu", position=ODD_TEXT, of=ODD_STATUS), QueueStatus)
