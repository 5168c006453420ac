"""Remedies for runs on this machine."""

from __future__ import annotations

import pytest

from ddp_cli.view.local_advice import omit_cluster_advice
from ddp_cli.view.why import REMEDIES
from ddp_pod.contract.failure_table import OOM


@pytest.mark.parametrize(
    ("remedy", "local"),
    [
        (OOM.remedy, "lower the batch size"),
        ("/dev/shm is full: raise spec.shm.sizeLimit and the memory limit, or use fewer DataLoader workers",
         "/dev/shm is full: use fewer DataLoader workers"),
        ("the quota is used up: enlarge the claim, or raise the limits of emptyDir",
         "the quota is used up: enlarge the claim, or raise the limits of emptyDir"),
        (REMEDIES["RepeatedFailure"], "Another attempt would fail in the same way: fix the cause."),
        ("Fix it: write A, and write B; then submit the job again.", "Fix it: write A, and write B."),
        ("Read it. Check the claim: kubectl get pvc.", "Read it. Check the claim: kubectl get pvc."),
        ("", ""),
    ],
)  # fmt: skip
def test_clauses_for_clusters_are_omitted(remedy: str, local: str) -> None:
    assert omit_cluster_advice(remedy) == local
