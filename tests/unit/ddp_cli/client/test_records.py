"""Records of deleted jobs are found at the place that the user names, and read like jobs."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ddp_cli.client.api import Api, Object
from ddp_cli.client.errors import ClientError, NotFound
from ddp_cli.client.job import Job
from ddp_cli.client.records import _SHOW, READER_IMAGE, open_record, read_records
from ddp_operator.api.constants import KIND
from ddp_operator.api.record import PodLog, Record, build_pattern, encode_record
from tests.support.builders import Json, resource

LOGS = (
    PodLog(pod="train-1-1-b", attempt=1, node=1, nproc=1, text="2026-11-20T12:00:02Z [rank1]: KeyError: 'x'"),
    PodLog(pod="train-1-0-a", attempt=1, node=0, nproc=1, text="2026-11-20T12:00:01Z step 1\n2026-11-20T12:00:03Z bye"),
)


def build_record(name: str = "train", **fields: Any) -> bytes:
    """Return the record of a failed job."""
    failure = {"attempt": 1, "category": "UserError", "message": "KeyError: 'x' at train.py:42", "rank": 1}
    failed = {"type": "Failed", "status": "True", "reason": "UserError", "lastTransitionTime": "2026-11-20T12:00:04Z"}
    status = {"phase": "Failed", "attempt": 1, "lastFailure": failure, "conditions": [failed]}
    raw = resource(name, namespace="team") | {"status": status}
    raw["metadata"]["uid"] = "1a2b3c4d-0000"
    event = {"involvedObject": {"kind": KIND, "uid": raw["metadata"]["uid"]}, "type": "Warning", "reason": "Failed"}
    event |= {"message": "the job failed", "lastTimestamp": "2026-11-20T12:00:04Z"}
    return base64.b64decode(encode_record(Record(**{"resource": raw, "events": (event,), "logs": LOGS, **fields})))


def store(place: Path, ended: str, content: bytes, name: str = "train") -> None:
    folder = place / "ddp-history" / "team"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{ended}-{name}-1a2b3c4d.json.gz").write_bytes(content)


def no_cluster() -> Api:
    raise AssertionError("needs no cluster")


def open_at(place: Path | str, name: str = "train", namespace: str = "team") -> Job:
    return open_record(str(place), name, namespace, no_cluster)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with two records of the job, and one of another job whose name ends like its."""
    store(tmp_path, "20261120T120004Z", build_record())
    store(tmp_path, "20261119T120004Z", build_record(logs=()))
    store(tmp_path, "20261121T120004Z", b"damaged", name="a-train")
    return tmp_path


def test_newest_record_has_status_and_explanation(place: Path) -> None:
    job = open_at(place)
    assert job.status.phase == "Failed"
    assert "KeyError" in str(job.why())


def test_lines_have_ranks_and_times_order_them(place: Path) -> None:
    lines = [str(line) for line in open_at(place).lines()]
    assert lines == ["[rank 0] step 1", "[rank 1] KeyError: 'x'", "[rank 0] bye"]
    assert [str(line) for line in open_at(place).lines(node=0, tail=1)] == ["[rank 0] bye"]
    assert len(list(open_at(place).lines(follow=True))) == 3


def test_record_without_lines_states_why(tmp_path: Path) -> None:
    store(tmp_path, "20261120T120004Z", build_record(logs=(), note="pods/log is forbidden"))
    with pytest.raises(NotFound, match="pods/log is forbidden"):
        list(open_at(tmp_path).lines())


def test_url_needs_fsspec_and_any_namespace_matches_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pipe_file("/place/ddp-history/team/20261120T120004Z-train-1a2b3c4d.json.gz", build_record())
    assert open_at("memory://place", namespace="").status.phase == "Failed"
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ClientError, match="needs the Python package fsspec"):
        open_at("memory://place")


def test_url_of_a_folder_needs_no_package(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert open_at(f"file://{place}").status.phase == "Failed"


def test_missing_and_damaged_records_are_named(place: Path) -> None:
    with pytest.raises(NotFound, match="no record of other"):
        open_at(place, "other")
    with pytest.raises(NotFound, match="no record of train"):
        open_at(place, namespace="else")
    with pytest.raises(ClientError, match=r"-a-train-1a2b3c4d\.json\.gz cannot be read"):
        open_at(place, "a-train")


class ClaimApi(Api):
    """A cluster whose temporary pod prints a record."""

    def __init__(self, phase: str, output: bytes) -> None:
        self.namespace = self.home = "team"
        self.status: Json = {"phase": phase}
        self.output = "./a-record:\n" + base64.encodebytes(output).decode()
        self.created: Json = {}
        self.calls: list[str] = []

    def request(self, method: str, path: str, query: Any = None, body: Any = None, content_type: str = "") -> Object:
        self.calls.append(method)
        self.created = body or self.created
        return {"metadata": {"name": "pod"}, "status": self.status}

    def lines(self, path: str, query: Mapping[str, str] | None = None, *, timeout: float = 30.0) -> Iterator[str]:
        yield from self.output.splitlines()


def test_claim_is_read_by_a_restricted_pod_that_is_deleted() -> None:
    api = ClaimApi("Succeeded", build_record())
    job = open_record("claim/ckpt/runs", "train", "team", lambda: api)
    assert job.status.phase == "Failed"
    assert api.calls == ["POST", "GET", "DELETE"]
    spec = api.created["spec"]
    assert spec["containers"][0]["image"] == READER_IMAGE
    assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "ckpt"}
    assert spec["containers"][0]["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["command"][4] == "./runs"
    open_record("claim/ckpt", "train", "team", lambda: api, image="registry.example/tools:1")
    assert api.created["spec"]["containers"][0]["image"] == "registry.example/tools:1"


def test_claim_that_cannot_be_mounted_is_named_and_pod_deleted() -> None:
    api = ClaimApi("Failed", b"")
    with pytest.raises(ClientError, match="claim ckpt"):
        open_record("claim/ckpt", "train", "team", lambda: api)
    assert api.calls[-1] == "DELETE"


def test_command_on_claim_prints_newest_records_first_or_nothing(place: Path) -> None:
    def show(folder: str, name: str, most: int = 1) -> list[str]:
        words = ["sh", "-c", _SHOW, "sh", folder, build_pattern("team", name), "1000000", str(most)]
        done = subprocess.run(words, cwd=place.parent, capture_output=True, check=True, timeout=60, text=True)
        return done.stdout.splitlines()

    head, *lines = show(f"./{place.name}", "train")
    assert head == "ddp-history/team/20261120T120004Z-train-1a2b3c4d.json.gz:"
    assert base64.b64decode("".join(lines)) == build_record()
    heads = [line for line in show(f"./{place.name}", "", 9) if line.endswith(":")]
    assert [head.split("/")[-1][:8] for head in heads] == ["20261121", "20261120", "20261119"]
    assert show(f"./{place.name}", "other") == []
    assert show("./missing", "train") == []


def test_newest_records_of_a_folder_come_first_and_a_pipe_is_named(place: Path) -> None:
    os.mkfifo(place / "ddp-history" / "team" / "20261122T120004Z-piped-1a2b3c4d.json.gz")
    found = list(read_records(str(place), "", "", no_cluster, most=3))
    assert [record.path.split("/")[-1][:8] for record in found] == ["20261122", "20261121", "20261120"]
    assert "no regular file" in found[0].problem
    assert found[2].decode().resource["metadata"]["name"] == "train"
    known = {record.path for record in found}
    assert list(read_records(str(place), "", "", no_cluster, most=3, known=known)) == []


def test_claim_whose_output_is_cut_has_the_whole_records(place: Path) -> None:
    api = ClaimApi("Succeeded", build_record())
    api.output += "./cut:\nabc\n"
    whole, cut = read_records("claim/ckpt", "team", "", lambda: api, most=9)
    assert whole.data == build_record()
    assert "was cut" in cut.problem
