"""The samples of the ranks of two pods, which pod 0 compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddp_pod.base.files import write_json
from ddp_pod.contract.group_facts import DIFFERENT, GroupFacts
from ddp_pod.contract.records import read_record
from ddp_pod.features.replicas.agent import PART
from ddp_pod.features.replicas.samples import REPLICAS_FILE
from ddp_pod.torchrun.round_state import RoundState
from ddp_pod.torchrun.store import SignedStore
from tests.support.launcher_config import launcher_pod


class SampledPods:
    """Two pods in one round."""

    def __init__(self, folder: Path) -> None:
        self.store = SignedStore(HashStore(), "secret", "run/0")
        self.folders = [folder / "pod-0", folder / "pod-1"]
        self.states = []
        for index, path in enumerate(self.folders):
            path.mkdir()
            pod = launcher_pod(path, nodes=2, node=index)
            self.states.append(RoundState(pod, self.store, 2, [PART.join_round(pod, self.store, 2)]))

    def share(self, index: int, **digests: int) -> None:
        """Write two samples of each rank of a pod."""
        rows = [[int(rank[1:]), step, 0, digest, 7, 0, 0, 1, 0] for rank, digest in digests.items() for step in (2, 3)]
        self.write(index, rows)

    def write(self, index: int, samples: Any) -> None:
        write_json(str(self.folders[index] / REPLICAS_FILE), {"samples": samples})


@pytest.fixture
def pods(tmp_path: Path) -> SampledPods:
    return SampledPods(tmp_path)


def test_pod_0_names_the_rank_that_differs_in_another_pod(pods: SampledPods) -> None:
    pods.share(0, r0=5, r1=5)
    assert pods.states[0].exchange(1)["groups"] is None
    pods.share(1, r2=5, r3=6)
    pods.states[1].exchange(2)
    assert pods.states[0].exchange(3)["groups"] is None, "the next comparison is not due"
    facts = read_record(GroupFacts, pods.states[0].exchange(9)["groups"])
    assert (facts.state, facts.rank, facts.pod) == (DIFFERENT, 3, 1)


def test_samples_are_deleted_after_their_round(pods: SampledPods) -> None:
    pods.share(1, r2=5)
    pods.states[1].exchange(1)
    assert pods.store.read("samples/1")
    for state in pods.states:
        state.forget()
    assert pods.store.read("samples/1") is None


@pytest.mark.parametrize("samples", [5, [[1, 2]], [["a"] * 9]])
def test_invalid_samples_are_ignored(pods: SampledPods, samples: Any) -> None:
    pods.write(0, samples)
    assert pods.states[0].exchange(1)["groups"] is None
