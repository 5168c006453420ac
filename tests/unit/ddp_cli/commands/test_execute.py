"""`ddp exec`: the pod of a rank, and kubectl's command line."""

from __future__ import annotations

import argparse

import pytest

from ddp_cli.client.logs import LogPod
from ddp_cli.commands.execute import build_kubectl, choose_pod
from ddp_cli.commands.io import CommandError

PODS = [LogPod("old-0", "trainer", 1, 0, 4), *(LogPod(f"pod-{node}", "trainer", 2, node, 4) for node in (0, 1, 3))]


@pytest.mark.parametrize(("rank", "pod"), [(0, "pod-0"), (3, "pod-0"), (4, "pod-1"), (15, "pod-3")])
def test_pod_of_newest_attempt_has_rank(rank: int, pod: str) -> None:
    assert choose_pod(PODS, rank, "mine").name == pod


@pytest.mark.parametrize(
    ("pods", "rank", "facts"),
    [(PODS, 8, ["rank 8", "0-3, 4-7, 12-15"]), (PODS[:2], 99, ["99", "0-3"]), ([], 0, ["ddp why mine -n ml"])],
)
def test_missing_pod_is_error_with_remedy(pods: list[LogPod], rank: int, facts: list[str]) -> None:
    with pytest.raises(CommandError) as raised:
        choose_pod(pods, rank, "mine -n ml")
    assert all(fact in str(raised.value) for fact in facts)


@pytest.mark.parametrize(
    ("options", "terminal", "words"),
    [
        ({}, False, "kubectl --namespace ml exec -i pod-0 -c trainer"),
        ({"context": "b"}, True, "kubectl --context b --namespace ml exec -it pod-0 -c trainer"),
        ({"kubeconfig": "k"}, False, "kubectl --kubeconfig k --namespace ml exec -i pod-0 -c trainer"),
    ],
)
def test_kubectl_gets_chosen_cluster_and_a_terminal_only_if_there_is_one(
    options: dict[str, str], terminal: bool, words: str
) -> None:
    arguments = argparse.Namespace(**{"kubeconfig": None, "context": None, **options})
    assert build_kubectl(arguments, "ml", PODS[1], terminal=terminal) == words.split()
