"""A switch with half of a job's nodes is cut: the operator waits. One node of eight is cut: it is lost."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support import split_network
from tests.support.network_namespace import run_in_namespace

pytestmark = pytest.mark.process


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has network namespaces")
def test_half_of_nodes_cut_at_once_is_no_loss_and_one_node_is() -> None:
    found = json.loads(run_in_namespace(split_network).splitlines()[-1])
    assert found["half"] == []
    assert all("4/8 nodes are silent at once" in message for message in found["half: messages"])
    assert found["one"] == [6]
