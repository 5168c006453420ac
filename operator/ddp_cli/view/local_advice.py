"""Remedies for runs on this machine: those of clusters without the parts that need one. Pure."""

import re
from typing import Final

_CLUSTER: Final = re.compile(
    r"kubectl|resources\.limits|memory limit|\bspec\.(?:shm|template|securityProfile)\b|ephemeral-storage|emptyDir"
    r"|\bclaim|fsGroup|runAsUser|ddp delete|submit the (?:job|file)|NetworkPolic|podPidsLimit|imagePullSecrets"
)
_CLAUSES: Final = re.compile(r"(; |, then |, or |, and )")


def omit_cluster_advice(remedy: str) -> str:
    """Return a remedy without the clauses that only a cluster can follow; a sentence of such clauses is kept."""
    return " ".join(map(_shorten, re.split(r"(?<=[.!?]) ", remedy)))


def _shorten(sentence: str) -> str:
    opening, colon, advice = sentence.rpartition(": ")
    end = "." if advice.endswith(".") else ""
    parts = ["", *_CLAUSES.split(advice.removesuffix("."))]
    kept = [
        (before, clause) for before, clause in zip(parts[::2], parts[1::2], strict=True) if not _CLUSTER.search(clause)
    ]
    if not kept:
        return sentence
    return f"{opening}{colon}{kept[0][1]}{''.join(before + clause for before, clause in kept[1:])}{end}"
