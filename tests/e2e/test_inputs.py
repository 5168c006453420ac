"""Inputs on real kubelets: a big download resumes after interruptions, and errors are reported before training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from ddp_operator.api.constants import LABEL_ATTEMPT
from tests.support.file_server import FileServer, pattern, serve_file

from .conftest import UserNamespace, here, make_claim, make_writable
from .test_cluster import script_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SIZE = 200_000_000
SHOW = """
import hashlib, time
digest = hashlib.sha256()
with open("/data/data.bin", "rb") as file:
    while piece := file.read(1 << 20):
        digest.update(piece)
print("sum", digest.hexdigest())
try:
    open("/data/other", "w")
except OSError as error:
    print("read-only:", error.strerror)
"""


@pytest.fixture
def foreign(cluster: UserNamespace) -> Iterator[str]:
    """A claim without write permission."""
    yield from make_claim(cluster, "foreign", {"hostPath": {"path": "/sys", "type": "Directory"}})


def job_of(name: str, server: FileServer, claim: str, **changes: Any) -> dict[str, Any]:
    first = {"url": f"{server.url}/set/data.bin", "mountPath": "/data", "claimName": claim, **changes}
    result = script_job(name, SHOW, nodes=2, inputs=[first], processGroupPolicy="Ignore")
    result["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "100m"}}
    return result


def attempts(cluster: UserNamespace, name: str) -> set[str]:
    """Return the attempts with pods; 0 is that of the pod that fetches."""
    return {pod.metadata.labels[LABEL_ATTEMPT] for pod in cluster.pods(name)}


def test_interrupted_download_is_complete_before_pods_read_it(cluster: UserNamespace, claim: str) -> None:
    sha = hashlib.sha256()
    for start in range(0, SIZE, 10_000_000):
        sha.update(pattern(start, 10_000_000))
    seen: list[set[str]] = []

    def look(start: int, count: int) -> bytes:
        if start // 50_000_000 != (start + count) // 50_000_000:
            seen.append(attempts(cluster, "big"))
        return pattern(start, count)

    server = FileServer(look, SIZE, cuts=[90_000_000])
    with serve_file(server, host=here(cluster)):
        assert cluster.apply(job_of("big", server, claim, checksum=f"sha256:{sha.hexdigest()}")).returncode == 0
        status = cluster.phase("big", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status
    assert seen
    assert all(item == {"0"} for item in seen)
    assert server.starts == [0, 90_000_000]
    assert server.sent == SIZE + 1
    [entry] = status["inputs"]
    assert (entry["phase"], entry["bytes"]) == ("Fetched", SIZE)
    for pod in cluster.pods("big"):
        log = cluster.kubectl("logs", pod.metadata.name).stdout
        assert f"sum {sha.hexdigest()}" in log
        assert "read-only: Read-only file system" in log
    assert attempts(cluster, "big") == {"1"}


@pytest.mark.parametrize(
    ("name", "served", "changes", "reason"),
    [
        ("not-found", {"statuses": [404]}, {}, "NotFound"),
        ("forbidden", {"statuses": [403]}, {}, "AccessDenied"),
        ("other-file", {"size": 5_000_000}, {"checksum": "sha256:" + "0" * 64}, "ChecksumMismatch"),
        ("full-disk", {"size": 10**16}, {}, "NoSpace"),
        ("not-ours", {}, {"claimName": "foreign"}, "NotWritable"),
    ],
)
def test_invalid_input_fails_job_before_training_pods_start(
    cluster: UserNamespace,
    claim: str,
    foreign: str,
    name: str,
    served: dict[str, Any],
    changes: dict[str, Any],
    reason: str,
) -> None:
    server = FileServer(pattern, **({"size": SIZE} | served))
    with serve_file(server, host=here(cluster)):
        job = job_of(name, server, claim, **changes)
        assert cluster.apply(job).returncode == 0
        status = cluster.phase(name, "Succeeded", "Failed")
    assert (status["phase"], status["reason"], status.get("attempt", 0)) == ("Failed", reason, 0), status
    [ready] = [condition for condition in status["conditions"] if condition["type"] == "InputsReady"]
    assert (ready["status"], ready["reason"]) == ("False", reason)
    assert f"({reason})" in cluster.why(name)
    assert attempts(cluster, name) == {"0"}


def test_node_cache_is_filled_before_its_pods(cluster: UserNamespace) -> None:
    """The cache folder is each node's own. Here nodes may share a disk, and then one fetches for its peers."""
    folder = f"/var/tmp/{cluster.namespace}"
    make_writable(cluster, folder)
    server = FileServer(pattern, 5_000_000)
    with serve_file(server, host=here(cluster)):
        job = job_of("cached", server, "", nodePath=folder)
        del job["spec"]["inputs"][0]["claimName"]
        assert cluster.apply(job).returncode == 0
        status = cluster.phase("cached", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status
    assert status["inputs"][0]["place"].startswith(f"node:{folder}/ddp-inputs/data.bin-")
    log = cluster.kubectl("logs", cluster.pods("cached")[0].metadata.name, "-c", "ddp-inputs").stdout
    assert "5.0 MB in /opt/ddp-inputs/" in log
