"""`ddp submit`, `list`, `watch`, `logs`, `why`, `scale`, … against the stand-in, with the operator at work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import yaml

from ddp_cli.__main__ import main
from ddp_cli.client.api import connect
from ddp_cli.commands.io import ExitCode
from ddp_cli.features.drill.lost_node import ChosenPod, JobFacts
from ddp_cli.features.drill.node_target import NodeTarget
from ddp_operator.api.constants import EXIT_USER_ERROR, KIND
from ddp_pod.features.history import store as history
from tests.support.builders import job_manifest
from tests.support.running_operator import Start, in_thread
from tests.support.standin import ClusterActors, StandIn

Ddp = Callable[..., Awaitable[int]]


@pytest.fixture
def ddp(kubeconfig: Path) -> Ddp:
    """Run a command in a thread and return its exit code."""

    async def run(*words: str) -> int:
        return await in_thread(main, [*words, "--kubeconfig", str(kubeconfig)])

    return run


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A job, and a ConfigMap that it needs."""
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script"}, "data": {"train.py": "1"}}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all([config, job_manifest()]))
    return path


async def test_job_is_submitted_watched_scaled_and_explained_to_its_end(
    ddp: Ddp, manifest: Path, server: StandIn, actors: ClusterActors, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    assert await ddp("submit", str(manifest), "--dry-run") == ExitCode.OK
    assert await actors.get(KIND, "digits") is None
    assert await ddp("submit", str(manifest)) == ExitCode.OK
    assert await actors.get("ConfigMap", "script") is not None
    assert 'digits: submitted to namespace "default"' in capsys.readouterr().out
    assert await ddp("submit", str(manifest)) == ExitCode.FAILED
    assert 'the job "digits" already exists' in capsys.readouterr().err

    await actors.resource("digits", lambda resource: resource.get("status", {}).get("conditions"))
    assert await ddp("why", "digits", "-o", "json") == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["reason"] in ("WaitingForPods", "WaitingForRanks")
    assert await ddp("list") == ExitCode.OK
    assert capsys.readouterr().out.splitlines()[1].split()[:4] in (
        ["digits", "Pending", "WaitingForPods", "2"],
        ["digits", "Pending", "WaitingForRanks", "2"],
    )

    assert await ddp("scale", "digits", "1") == ExitCode.OK
    assert "scaled from 2 to 1 nodes" in capsys.readouterr().out
    resized = await actors.resource("digits", lambda result: result["status"]["nodes"]["desired"] == 1)
    job = resized["status"]["jobName"]
    assert await ddp("suspend", "digits") == ExitCode.OK
    await actors.phase("digits", "Suspended")
    assert await ddp("why", "digits") == ExitCode.OK
    assert "ddp resume digits" in capsys.readouterr().out
    assert await ddp("resume", "digits") == ExitCode.OK

    watching = asyncio.create_task(ddp("watch", "digits"))
    pod = await actors.run_pod(job, 0)
    server.write_log(pod["metadata"]["name"], "2026-01-01T00:00:01Z loss 0.5", "2026-01-01T00:00:02Z loss 0.4")
    following = asyncio.create_task(ddp("logs", "digits", "-f"))
    await actors.resource("digits", lambda results: results["status"]["nodes"]["ready"] == 1)
    await actors.finish_pod(job, 0)
    assert (await watching, await following) == (ExitCode.OK, ExitCode.OK)
    shown = capsys.readouterr()
    assert "[rank 0] loss 0.5\n[rank 0] loss 0.4\n" in shown.out
    assert " digits: Succeeded" in shown.out
    assert "digits has succeeded" in shown.err
    assert await ddp("scale", "digits", "3") == ExitCode.FAILED
    assert "has ended (Succeeded) and cannot be changed" in capsys.readouterr().err
    assert await ddp("delete", "digits", "--wait") == ExitCode.OK
    assert await actors.get(KIND, "digits") is None
    assert await actors.list("Pod") == []


async def test_drill_of_a_lost_node_sees_the_pod_of_its_index_and_the_status(
    kubeconfig: Path, ddp: Ddp, actors: ClusterActors, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    await actors.create(job_manifest())
    pods = [await actors.run_pod("digits-1", index) for index in (0, 1)]
    await actors.phase("digits", "Running")

    target = NodeTarget(connect(kubeconfig=str(kubeconfig)), "digits", 1)
    chosen = await in_thread(target.choose)
    uid = pods[1]["metadata"]["uid"]
    assert chosen == ChosenPod(pods[1]["metadata"]["name"], uid, pods[1]["spec"]["nodeName"])
    sighting = await in_thread(next, target.sightings())
    assert sighting.facts == JobFacts(uids=frozenset({uid}))
    assert await ddp("drill", "digits", "--lose-node", "2") == ExitCode.BAD_INPUT
    assert "--lose-node: digits has no running pod 2" in capsys.readouterr().err
    assert await ddp("drill", "digits", "--lose-node", "1", "--after", "0") == ExitCode.BAD_INPUT
    assert "needs a job that reports steps" in capsys.readouterr().err


async def test_failed_job_ends_watch_with_1_and_its_cause(
    ddp: Ddp, actors: ClusterActors, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    await actors.create(job_manifest(nodes=1))
    watching = asyncio.create_task(ddp("watch", "digits"))
    await actors.run_pod("digits-1", 0)
    words = json.dumps(
        {"version": 2, "category": "UserError", "message": "no such file", "rank": 0, "remedy": "give another path"}
    )
    await actors.finish_pod("digits-1", 0, exit_code=EXIT_USER_ERROR, message=words)
    assert await watching == ExitCode.FAILED
    shown = capsys.readouterr()
    assert "no such file." in shown.err
    assert "Give another path." in shown.err
    assert await ddp("watch", "digits", "-o", "json") == ExitCode.FAILED
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["status"]["phase"] == "Failed"


async def test_logs_of_all_ranks_are_merged_by_time(
    ddp: Ddp, server: StandIn, actors: ClusterActors, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    await actors.create(job_manifest())
    assert await ddp("logs", "digits") == ExitCode.NOT_FOUND
    assert "ddp why digits" in capsys.readouterr().err
    for index in (0, 1):
        pod = await actors.run_pod("digits-1", index)
        server.write_log(pod["metadata"]["name"], *(f"2026-01-01T00:00:0{index + 2 * n}Z line {n}" for n in range(2)))
    assert await ddp("logs", "digits") == ExitCode.OK
    assert capsys.readouterr().out == "[rank 0] line 0\n[rank 1] line 0\n[rank 0] line 1\n[rank 1] line 1\n"
    assert await ddp("logs", "digits", "--node", "1", "--tail", "1", "--timestamps") == ExitCode.OK
    assert capsys.readouterr().out == "2026-01-01T00:00:03Z [rank 1] line 1\n"


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["why", "nobody"], ExitCode.NOT_FOUND, 'job "nobody" does not exist in namespace "default"'),
        (["scale", "nobody", "2"], ExitCode.NOT_FOUND, "`ddp list -A` lists all"),
        (["delete", "nobody"], ExitCode.NOT_FOUND, 'job "nobody" does not exist'),
        (["logs", "nobody"], ExitCode.NOT_FOUND, 'job "nobody" does not exist'),
        (["watch", "nobody"], ExitCode.NOT_FOUND, 'job "nobody" does not exist'),
        (["drill", "nobody", "--kill", "0"], ExitCode.NOT_FOUND, 'job "nobody" does not exist'),
        (["watch", "x", "-A"], ExitCode.BAD_INPUT, "leave out -A or NAME"),
        (["submit", "none.yaml"], ExitCode.BAD_INPUT, "No such file or directory; name the path of a job's YAML"),
        (["list", "--context", "other"], ExitCode.BAD_INPUT, "the kubeconfig is invalid"),
    ],
)
async def test_invalid_input_is_reported_in_one_sentence(
    ddp: Ddp, words: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await ddp(*words) == code
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.startswith(f"ddp {words[0]}: ")
    assert complaint.count("\n") == 1


def test_unreachable_cluster_and_missing_operator_are_errors_with_remedy(
    kubeconfig: Path, server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StandIn(crd=False) as bare:
        (tmp_path / "bare").mkdir()
        second = bare.write_kubeconfig(tmp_path / "bare")
        assert main(["list", "--kubeconfig", str(second)]) == ExitCode.CLUSTER
        assert "install the operator" in capsys.readouterr().err
    server.stop()
    assert main(["list", "--kubeconfig", str(kubeconfig)]) == ExitCode.CLUSTER
    complaint = capsys.readouterr().err
    assert "(Connection refused); check that the cluster is running" in complaint
    assert complaint.count("\n") == 1


async def test_folder_of_script_is_stored_in_config_map_owned_by_jobs(
    ddp: Ddp,
    tmp_path: Path,
    server: StandIn,
    actors: ClusterActors,
    start: Start,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in {"train.py": "print(1)", "data.txt": "1", ".env": "TOKEN=1"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    start()
    options = ("--image", "pytorch", "--gpus", "0", "--nodes", "2")
    assert await ddp("submit", "train.py", *options, "--dry-run") == ExitCode.OK
    assert await actors.list("ConfigMap") == []
    assert await ddp("submit", "train.py", *options) == ExitCode.OK
    shown = capsys.readouterr().err
    assert "code: 2 files of " in shown
    assert "left out possible secrets: .env, kubeconfig;" in shown
    job = await actors.resource("train", lambda resource: resource.get("status", {}).get("phase"))
    name = job["spec"]["code"]["source"].removeprefix("configmap/")
    config_map = await actors.get("ConfigMap", name)
    assert config_map is not None
    assert [owner["uid"] for owner in config_map["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    assert job["spec"]["code"]["revision"] == job["spec"]["code"]["digest"][:12]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python3", "train.py"]

    assert await ddp("submit", "train.py", *options) == ExitCode.FAILED  # the name is taken
    assert await ddp("submit", "train.py", *options, "--name", "again") == ExitCode.OK
    config_map = await actors.get("ConfigMap", name)
    assert config_map is not None
    assert len(config_map["metadata"]["ownerReferences"]) == 2

    (tmp_path / "train.py").write_text("print(2)")
    assert await ddp("submit", "train.py", *options) == ExitCode.FAILED
    named_so = [item for item in await actors.list("ConfigMap") if item["metadata"]["name"].startswith("ddp-code-")]
    assert len(named_so) == 1  # nothing remains of the refused job
    assert await ddp("submit", "train.py", "--workdir", str(tmp_path / "missing")) == ExitCode.BAD_INPUT


async def test_deleted_job_is_reported_from_its_record(
    ddp: Ddp, server: StandIn, actors: ClusterActors, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ckpt"
    checkpoint = {"path": str(folder), "claimName": "ckpt"}
    start()
    spec = {"nodes": 1, "history": {}, "checkpoint": checkpoint, "ttlSecondsAfterFinished": 0}
    await actors.create(job_manifest("digits", **spec))
    pod = await actors.run_pod("digits-1", 0)
    server.write_log(pod["metadata"]["name"], "2026-11-20T12:00:01Z [rank0]: the last step")
    await actors.finish_pod("digits-1", 0)

    job = await actors.child_job("digits-history")
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert history.main(container["command"][3:]) == 0
    await actors.run_pod("digits-history", 0)
    await actors.finish_pod("digits-history", 0)
    await actors.gone(KIND, "digits")

    assert await ddp("logs", "digits") == ExitCode.NOT_FOUND
    assert "--history" in capsys.readouterr().err
    assert await ddp("logs", "digits", "--history", str(folder)) == ExitCode.OK
    assert capsys.readouterr().out == "[rank 0] the last step\n"
    assert await ddp("why", "digits", "--history", str(folder)) == ExitCode.OK
    assert capsys.readouterr().out.startswith("digits has succeeded")
    page = tmp_path / "page.html"
    assert await ddp("report", "digits", "--history", str(folder), "-o", str(page)) == ExitCode.OK
    assert "Succeeded" in page.read_text()
