"""Faults inside pods from outside: SIGKILL of a container's first process needs a process of the node.

The kernel ignores a SIGKILL that the first process of a container gets from within the container.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from .conftest import UserNamespace

_KILL: Final = """
import os, signal, sys, time

uid, role = sys.argv[1:]
launcher = agent = rank = 0
pids = []
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        cgroup = open(f"/proc/{name}/cgroup").read()
        words = open(f"/proc/{name}/cmdline", "rb").read().decode().split("\\0")
        status = dict(line.split(":\\t", 1) for line in open(f"/proc/{name}/status") if ":\\t" in line)
    except OSError:
        continue
    if uid in cgroup.replace("_", "-") and any(word.endswith("launcher.py") for word in words):
        pids.append((int(name), int(status["PPid"]), status["NSpid"].split()[-1], words))
for pid, parent, inner, words in pids:
    if inner == "1":
        launcher = pid
    if "worker" in words[:5]:
        agent, rank = parent, pid
target = {"launcher": launcher, "agent": agent, "rank": rank}[role]
if not target:
    sys.exit(f"no {role} among {pids}")
os.kill(target, signal.SIGKILL)
print(time.time())
"""


class NodeShell:
    """A privileged pod that sees the processes of its node."""

    def __init__(self, cluster: UserNamespace, name: str) -> None:
        self._cluster = cluster
        self._name = name

    def kill(self, pod: Any, role: str) -> float:
        """Send SIGKILL to the launcher, the agent or a rank of a pod; returns the time in Unix seconds."""
        command = ("exec", self._name, "--", "python3", "-c", _KILL, pod.metadata.uid, role)
        done = self._cluster.kubectl(*command)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)


@contextmanager
def open_node_shell(cluster: UserNamespace, node: str, image: str) -> Iterator[NodeShell]:
    """Start a privileged pod on a node, deleted afterwards. ``image``: contains Python."""
    name = f"shell-{node}"
    container = {
        "name": "shell",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "3600"],
        "securityContext": {"privileged": True, "runAsUser": 0},
    }
    spec = {
        "nodeName": node,
        "hostPID": True,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    cluster.core.create_namespaced_pod(cluster.namespace, {"metadata": {"name": name}, "spec": spec})
    try:
        cluster.until(
            lambda: cluster.core.read_namespaced_pod(name, cluster.namespace).status.phase == "Running", f"{name} runs"
        )
        yield NodeShell(cluster, name)
    finally:
        cluster.core.delete_namespaced_pod(name, cluster.namespace, grace_period_seconds=0)
