"""Strategies for generated inputs: JSON of any shape, pod templates, mutated manifests, clusters of jobs and pods."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from ddp_pod.contract.failure_table import CATEGORIES
from tests.support.builders import Json, child_job, child_pod, last_words, resource, template, trainer

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
json = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)

POD_WORDS = (
    "containers", "initContainers", "name", "image", "command", "args", "env", "ports", "containerPort", "resources",
    "limits", "requests", "cpu", "nvidia.com/gpu", "volumes", "volumeMounts", "mountPath", "securityContext",
    "capabilities", "add", "metadata", "labels", "annotations", "spec", "restartPolicy", "tolerations", "hostNetwork",
    "terminationGracePeriodSeconds", "terminationMessagePath", "subdomain",
)  # fmt: skip
pod_json = st.recursive(
    scalars | st.sampled_from(["trainer", "python", "train.py", "1", "4", "Always", "Never", "/dev/shm", 29400, 9400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(POD_WORDS), inner, max_size=5),
    max_leaves=20,
)

RICH = template(
    trainer(
        args=["--lr", "0.1"],
        env=[{"name": "A", "value": "b"}],
        ports=[{"name": "x", "containerPort": 6006}],
        resources={"limits": {"cpu": "4", "nvidia.com/gpu": "2"}, "requests": {"cpu": 1}},
        securityContext={"capabilities": {"add": ["IPC_LOCK"]}},
        volumeMounts=[{"name": "data", "mountPath": "/data"}],
        terminationMessagePath="/tmp/end",
    ),
    metadata={"labels": {"a": "b"}, "annotations": {"c": "d"}},
    initContainers=[{"name": "fetch", "image": "x"}, {"name": "logs", "image": "x", "restartPolicy": "Always"}],
    volumes=[{"name": "data", "emptyDir": {}}],
    tolerations=[{"key": "k"}],
    securityContext={"runAsUser": 1},
    terminationGracePeriodSeconds=60,
)
FULL = resource(
    nodes=2,
    procPerNode="auto",
    suspend=False,
    template=template(),
    rendezvous={"backend": "c10d", "port": 29400, "joinTimeoutSeconds": 600},
    sharedMemory="8Gi",
    recovery={
        "inPlaceRestarts": 1,
        "maxRestarts": 3,
        "nonRetryableExitCodes": [2, 126],
        "resetAfterSteps": 10,
        "countDisruptions": True,
        "forceDeleteAfterSeconds": 60,
        "avoidFailedNodes": False,
    },
    checkpoint={"path": "/ckpt", "claimName": "c", "graceSeconds": 120},
    metrics={"port": 9400},
    activeDeadlineSeconds=60,
    ttlSecondsAfterFinished=60,
    securityProfile="Default",
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every member of a JSON value."""
    result = [path] if path else []
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        result += places(member, (*path, name))
    return result


def mutate(value: Any, path: tuple[Any, ...], new: Any, how: str) -> Any:
    """Replace, remove or misspell one member. A path that an earlier change has removed changes nothing."""
    changed = copy.deepcopy(value)
    node = changed
    for name in path[:-1]:
        try:
            node = node[name]
        except (KeyError, IndexError, TypeError):
            return changed
    last = path[-1]
    if not isinstance(node, dict | list) or (isinstance(node, dict) and last not in node):
        return changed
    if isinstance(node, list) and (not isinstance(last, int) or last >= len(node)):
        return changed
    if how == "remove":
        del node[last]
    elif how == "misspell" and isinstance(node, dict):
        node[f"{last}x"] = node.pop(last)
    else:
        node[last] = new
    return changed


INTERESTING = (
    0, 1, -1, 2, 80, 1023, 1024, 9400, 29400, 65535, 65536, 5000, 5001, 10_001, 2**31, 2**63, 2**70, 1.0, 2.5,
    True, False, None, [], {}, [1], [0], [256], ["a"],
    "", "auto", "gpu", "cpu", "static", "c10d", "/x", "x", "8Gi", "2", "Restricted", "a" * 51, "a.b", "A", "9a", "a-",
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, base: Json, *, outside: tuple[str, ...] = ()) -> Json:
    """Return ``base`` with a few members replaced, removed or misspelt; names that start with ``outside`` are kept."""
    value: Json = base
    choices = [path for path in places(base) if not outside or path[: len(outside)] != outside]
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(choices))
        how = draw(st.sampled_from(["replace", "replace", "remove", "misspell"]))
        value = mutate(value, path, draw(st.sampled_from(INTERESTING) | json), how)
    return value


CODES = (1, 81, 82, 83, 84, 85, 86, 128, 130, 137, 143)
categories = st.sampled_from(tuple(CATEGORIES))


@st.composite
def words(draw: st.DrawFn, category: str) -> Json:
    """Return a launcher's termination message."""
    return last_words(
        category,
        secondary=draw(st.booleans()),
        rank=draw(st.integers(0, 3)),
        progress={"step": float(draw(st.integers(0, 50))), "ddp_planned_steps": 50.0},
        restarts=draw(st.integers(0, 3)),
    )


@st.composite
def pods(draw: st.DrawFn, attempts: int = 3) -> Json:
    """Return a pod of one of the first attempts, in any state that the API server could show."""
    phase = draw(st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]))
    attempt = draw(st.integers(1, attempts))
    end: Json = {}
    if phase == "Succeeded":
        end = {"code": 0, "message": draw(st.just("") | words("")), "reason": "Completed"}
    elif phase == "Failed":
        end = {"code": draw(st.sampled_from(CODES)), "message": draw(st.just("") | categories.flatmap(words))}
        end["reason"] = draw(st.sampled_from(["Error", "Error", "OOMKilled"]))
    return child_pod(
        draw(st.integers(0, 2)),
        phase,
        attempt=attempt,
        suffix=draw(st.sampled_from(["aaaaa", "bbbbb", "ccccc"])),
        age=draw(st.integers(0, 5)),
        owner=draw(st.sampled_from([f"job-{attempt}", f"job-{attempt}", "gone"])),
        deleting=draw(st.booleans()),
        disrupted=draw(st.sampled_from([False, True, "DeletionByTaintManager"])),
        **end,
    )


@st.composite
def jobs(draw: st.DrawFn, attempt: int) -> Json:
    """Return the child Job of an attempt in any state."""
    kinds = draw(st.sampled_from([(), (), ("FailureTarget",), ("FailureTarget", "Failed"), ("Complete",)]))
    return child_job(
        attempt,
        nodes=draw(st.integers(1, 3)),
        deleting=draw(st.booleans()),
        suspend=draw(st.booleans()),
        conditions=dict.fromkeys(kinds, "words"),
        awaits_peers=draw(st.booleans()),
    )
