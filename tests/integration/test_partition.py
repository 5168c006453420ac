"""A pod that is cut off, replaced, and returns: it joins no round, and its peers do not notice it."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support import partition
from tests.support.network_namespace import run_in_namespace


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has network namespaces")
def test_replaced_pod_joins_no_round_during_and_after_partition() -> None:
    found = json.loads(run_in_namespace(partition).splitlines()[-1])
    assert found["before"] == ["rank 0 of 2", "rank 1 of 2"]
    assert (found["peer"], found["successor"]) == ("rank 0 of 2", "rank 1 of 2")
    assert found["lost during the partition"] is False
    assert "another pod has taken the place of this pod 1" in found["lost after the partition"]
    assert found["peers restart again"] is False
    assert found["answers"] == [True, False, True]
    assert found["one-way"] is False
