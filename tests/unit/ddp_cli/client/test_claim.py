"""The pod that copies a folder to a claim: on a node where the job's pods may run, and with minimal rights."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from websocket import WebSocketConnectionClosedException

from ddp_cli.client.api import Api
from ddp_cli.client.claim import _transfer, build_pod, put_on_claim
from ddp_cli.client.errors import ApiError
from ddp_cli.client.packing.packed import pack_code
from ddp_operator.api.parse import parse_resource
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.template import resolve_template
from tests.support.builders import resource, template, trainer


def test_pod_has_jobs_image_and_place_and_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    code = pack_code(tmp_path, claim="sources")
    container = trainer(
        image="example.com/torch:1",
        command=["/opt/python3", "train.py"],
        resources={"limits": {"nvidia.com/gpu": "8"}},
        env=[{"name": "TOKEN", "value": "secret"}],
        securityContext={"runAsUser": 7},
    )
    place = {"nodeSelector": {"pool": "a"}, "imagePullSecrets": [{"name": "registry"}], "hostNetwork": True}
    job = parse_resource(resource("job", code=dict(code.spec), template=template(container, **place)), SCHEMA)
    pod = build_pod(code, resolve_template(job))["spec"]
    [sender] = pod["containers"]
    assert sender["image"] == "example.com/torch:1"
    assert sender["securityContext"]["runAsUser"] == 7
    assert sender["securityContext"]["allowPrivilegeEscalation"] is False
    assert "limits" not in sender["resources"]
    assert "env" not in sender
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "sources"}
    assert pod["nodeSelector"] == {"pool": "a"}
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert "hostNetwork" not in pod
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)
    assert pod["activeDeadlineSeconds"] > 0
    assert code.path == f"ddp-code/{code.archive.digest}.tar.gz"


@pytest.mark.parametrize("statuses", [(201,), (403, 201), (403, 403), (409,)])
def test_pod_that_is_forbidden_has_requests_of_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: tuple[int, ...]
) -> None:
    """A LimitRange may have a minimum."""
    (tmp_path / "train.py").write_text("")
    code = pack_code(tmp_path, claim="sources")
    container = trainer(resources={"limits": {"memory": "2Gi", "nvidia.com/gpu": "8"}})
    job = parse_resource(resource("job", code=dict(code.spec), template=template(container)), SCHEMA)
    sent = []

    class Server:
        namespace = "default"

        def request(self, method: str, path: str, query: Any = None, body: Any = None) -> Any:
            if method != "POST":
                return {"status": {"phase": "Running"}}
            sent.append(body["spec"]["containers"][0]["resources"]["requests"])
            if statuses[len(sent) - 1] != 201:
                raise ApiError("minimum memory usage per Container is 1Gi", statuses[len(sent) - 1])
            return {"metadata": {"name": "ddp-code-x"}}

    monkeypatch.setattr("ddp_cli.client.claim._send", lambda api, name, code: name)
    with nullcontext() if statuses[-1] == 201 else pytest.raises(ApiError):
        assert put_on_claim(cast(Api, Server()), code, resolve_template(job)) == "ddp-code-x"
    assert sent == [{"cpu": "100m", "memory": "64Mi"}, {"memory": "2Gi"}][: len(statuses)]


class Shell:
    """The other end of `exec`: requests the archive, and reads it or ends."""

    def __init__(self, *, takes: bool, errors: bytes = b"") -> None:
        self.takes = takes
        self.errors = errors
        self.got = b""
        self.said = [b"send\n"]

    def is_open(self) -> bool:
        return True

    def update(self, timeout: float) -> None:
        pass

    def read_stdout(self, timeout: float) -> bytes:
        return self.said.pop(0) if self.said else b""

    def read_stderr(self, timeout: float) -> bytes:
        return self.errors

    def write_stdin(self, data: bytes) -> None:
        if not self.takes:
            raise WebSocketConnectionClosedException("socket is already closed.")
        self.got += data
        self.said = [b"stored\n"]


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        ({"takes": True}, (b"send\nstored\n", "", "")),
        (
            {"takes": False, "errors": b"sh: 4: cannot create /code/x.tmp: Permission denied\n"},
            (b"send\n", "sh: 4: cannot create /code/x.tmp: Permission denied", "socket is already closed."),
        ),
        ({"takes": False}, (b"send\n", "", "socket is already closed.")),
    ],
    ids=["taken", "the folder may not be written", "cut"],
)
def test_errors_of_shell_that_ends_early_are_returned(shell: dict[str, Any], expected: tuple[bytes, str, str]) -> None:
    made = Shell(**shell)
    data = bytes(700_000)
    assert _transfer(made, data) == expected
    assert len(made.got) in (0, len(data))
