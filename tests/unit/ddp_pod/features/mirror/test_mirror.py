"""The mirror of a checkpoint folder: when its files are complete, and which files it uploads."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.contract.plan import CheckpointStoreConfig, encode_plan
from ddp_pod.features.mirror import snapshots
from ddp_pod.features.mirror.checkpoints import (
    NEWEST,
    MirrorConfig,
    MirrorEvent,
    MirrorRequest,
    MirrorState,
    decode_event,
)
from ddp_pod.features.mirror.process import Mirror, find_step, list_written_files
from ddp_pod.features.mirror.shards import has_shards, read_shard_names
from ddp_pod.features.mirror.snapshots import PrefixSuperseded
from ddp_pod.transfer.sources import UnusableStorage
from tests.support.launcher_config import launcher_pod
from tests.support.mirror_clock import MirrorClock


class MirrorRun:
    """The mirror of a pod, with the test's clock."""

    def __init__(self, root: Path, clock: MirrorClock, attempt: int = 1, *, node: int = 0, nodes: int = 1) -> None:
        self.clock = clock
        self.root = root
        self.folder = root / f"ckpt-{attempt}-{node}"
        self.folder.mkdir(exist_ok=True)
        (root / "metrics").mkdir(exist_ok=True)
        store = CheckpointStoreConfig(f"file://{root}/store", 2)
        pod = launcher_pod(root, node=node, nodes=nodes, checkpoint=store)
        config = MirrorConfig(encode_plan(pod), str(self.folder), attempt, f"job-{attempt}")
        self.events: list[MirrorEvent] = []
        self.mirror = Mirror(config, self.events.append)
        self.request(claim=node == 0, fetch=NEWEST)

    def request(self, **fields: Any) -> None:
        self.mirror._execute(MirrorRequest(1, **fields))

    def scan(self, seconds: float = 0.0) -> bool:
        self.clock.now += seconds
        return self.mirror._advance(final=False)

    def settle(self) -> bool:
        """Scan until files count as complete."""
        self.scan()
        return self.scan(3)

    def flush(self) -> None:
        self.request(flush=True)

    def saved(self) -> dict[str, Any]:
        """The newest manifest."""
        written = sorted((self.root / "store" / "snapshots").glob("*.json"))
        manifest: dict[str, Any] = json.loads(written[-1].read_text()) if written else {}
        return manifest

    def list_saved(self) -> set[str]:
        """The files of the newest manifest."""
        return set(self.saved().get("files", ()))

    @property
    def state(self) -> MirrorState:
        return next(event.state for event in reversed(self.events) if event.state is not None)

    def save_shard(self, checkpoint: str, rank: int, content: str) -> None:
        folder = self.folder / checkpoint
        folder.mkdir(exist_ok=True)
        (folder / f"__{rank}_0.distcp").write_text(content)

    def save_list(self, checkpoint: str, save: int = 0) -> None:
        names = [f"__{rank}_0.distcp" for rank in (0, 1)]
        (self.folder / checkpoint / ".metadata").write_bytes(pickle.dumps({"storage": names, "save": save}))

    def list_files(self) -> dict[str, bytes]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}


@pytest.fixture
def run(tmp_path: Path, mirror_clock: MirrorClock) -> MirrorRun:
    return MirrorRun(tmp_path, mirror_clock)


def test_file_is_uploaded_once_it_has_settled(run: MirrorRun) -> None:
    (run.folder / "step-12.pt").write_text("x")
    assert not run.scan()
    assert run.state.pending
    assert run.saved() == {}
    assert run.scan(3)
    assert run.saved()["step"] == 12
    assert (run.state.step, run.state.pending) == (12, False)


def test_unchanged_folder_writes_no_snapshot(run: MirrorRun) -> None:
    (run.folder / "a").write_text("x")
    run.settle()
    before = run.saved()
    assert run.scan(100)
    (run.folder / "a").write_text("x")  # with the same content
    run.settle()
    assert run.saved() == before


def test_open_file_delays_upload_for_a_limited_time(run: MirrorRun) -> None:
    with (run.folder / "log").open("w") as log:
        log.write("x")
        log.flush()
        (run.folder / "step-1.pt").write_text("x")
        run.scan()
        assert not run.scan(5)
        run.scan(40)
        assert list(run.saved()["files"]) == ["step-1.pt"]
        assert not run.state.pending
        (run.folder / "step-2.pt").write_text("x")
        run.scan()
        run.scan(3)
        assert sorted(run.saved()["files"]) == ["step-1.pt", "step-2.pt"]
    run.flush()
    assert "log" in run.saved()["files"]


def test_file_replaced_all_the_time_is_uploaded_now_and_then(run: MirrorRun) -> None:
    for step in range(20):
        (run.folder / "new.tmp").write_text(str(step))
        os.replace(run.folder / "new.tmp", run.folder / "last.pt")
        run.scan(1.9)
    assert list(run.saved()["files"]) == ["last.pt"]


def test_half_written_trainer_folder_is_left_out(run: MirrorRun) -> None:
    (run.folder / "checkpoint-5").mkdir()
    (run.folder / "checkpoint-5" / "model.safetensors").write_text("x")
    run.scan()
    assert not run.scan(10)
    (run.folder / "checkpoint-5" / "trainer_state.json").write_text("{}")
    run.settle()
    assert run.saved()["step"] == 5
    assert len(run.saved()["files"]) == 2


def test_temporary_names_are_ignored(run: MirrorRun) -> None:
    (run.folder / ".step-1.pt.tmp").write_text("x")
    (run.folder / "a.tmp").write_text("x")
    (run.folder / "tmp-checkpoint-1").mkdir()
    (run.folder / "tmp-checkpoint-1" / "a").write_text("x")
    run.flush()
    assert run.saved() == {}


def test_reported_step_becomes_step_of_snapshot(run: MirrorRun, tmp_path: Path) -> None:
    page = '# TYPE ddp_checkpoint_step gauge\nddp_checkpoint_step{rank="0"} 77\n'
    (tmp_path / "metrics" / "0.prom").write_text(page)
    (run.folder / "last.pt").write_text("x")
    run.settle()
    assert run.saved()["step"] == 77


def test_failing_store_is_reported_and_retried(run: MirrorRun, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.folder / "a").write_text("x")
    run.scan()
    with monkeypatch.context() as broken:
        broken.setattr(run.mirror._store, "upload", lambda *_: (_ for _ in ()).throw(OSError("503 Slow Down")))
        assert not run.scan(3)
        assert "503 Slow Down" in run.state.problem
        assert run.state.failures == 1
    assert not run.scan()  # too early
    assert run.scan(31)
    assert run.state.problem == ""
    assert run.saved()["files"]


def test_superseded_attempt_ends(run: MirrorRun, tmp_path: Path, mirror_clock: MirrorClock) -> None:
    MirrorRun(tmp_path, mirror_clock, attempt=2)
    (run.folder / "a").write_text("x")
    run.scan()
    with pytest.raises(PrefixSuperseded):
        run.scan(3)


def test_older_snapshot_is_kept_until_newest_is_intact(
    run: MirrorRun, tmp_path: Path, mirror_clock: MirrorClock
) -> None:
    for step in (1, 2):
        (run.folder / "step.pt").write_text(f"state {step}")
        run.flush()
    ((digest, _),) = run.saved()["files"].values()
    (tmp_path / "store" / "objects" / digest).write_text("damaged")
    second = MirrorRun(tmp_path, mirror_clock, attempt=2)
    assert (second.folder / "step.pt").read_text() == "state 1"
    for step in (3, 4):
        (second.folder / "step.pt").write_text(f"state {step}")
        second.flush()
    assert second.events[-1] == MirrorEvent(done="000000002-000000002", number=1)
    assert len(list((tmp_path / "store" / "objects").iterdir())) == 2


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("step-000000500-attempt-2.pt", 500),
        ("checkpoint-40/model.safetensors", 40),
        ("epoch=1-step=90.ckpt", 90),
        ("global_step7/mp_rank_00.pt", 7),
        ("last.pt", None),
        ("epoch-3.pt", None),
        ("footstep-9.txt", None),
    ],
)
def test_step_is_found_in_names(path: str, step: int | None) -> None:
    assert find_step([path]) == step


def test_only_files_open_for_writing_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("w"):
        assert path.stat().st_ino in list_written_files()
    with path.open():
        assert path.stat().st_ino not in list_written_files()


@pytest.mark.parametrize(
    "event", [MirrorEvent(done="", number=3), MirrorEvent(state=MirrorState(step=1, time=2.0)), MirrorEvent(end="E")]
)
def test_event_survives_json(event: MirrorEvent) -> None:
    assert decode_event(event.encode()) == event


# ---- checkpoints of torch.distributed.checkpoint, whose shards several pods write

COMPLETE = {"step-1/__0_0.distcp", "step-1/__1_0.distcp", "step-1/.metadata"}


@pytest.fixture
def pods(tmp_path: Path, mirror_clock: MirrorClock) -> list[MirrorRun]:
    return [MirrorRun(tmp_path, mirror_clock, node=node, nodes=2) for node in (0, 1)]


def save(pods: list[MirrorRun], checkpoint: str, content: str = "x") -> None:
    for rank, pod in enumerate(pods):
        pod.save_shard(checkpoint, rank, f"{content}{rank}")
    pods[0].save_list(checkpoint)


def share(pods: list[MirrorRun]) -> None:
    """Start a round, as the agents do."""
    if has_shards(str(pods[1].folder)):
        pods[1].request(claim=True, flush=True)
    pods[0].request(flush=True, align=True)
    last = pods[0].mirror._last
    pods[1].request(fetch=last.name if last else None, align=True)


def test_names_of_shards_are_read_without_loading_the_pickle(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    names = [f"__{rank}_{part}.distcp" for rank in range(300) for part in range(2)]
    path.write_bytes(pickle.dumps([b"x" * (1 << 20), names]))
    assert read_shard_names(str(path)) == set(names)


def test_checkpoint_without_a_shard_of_another_pod_is_not_published(
    pods: list[MirrorRun], mirror_clock: MirrorClock
) -> None:
    save(pods, "step-1")
    (pods[0].folder / "log.txt").write_text("x")
    assert not pods[0].settle()
    mirror_clock.now += 60
    pods[0].settle()
    assert pods[0].list_saved() == {"log.txt"}
    pods[1].request(claim=True)
    pods[1].settle()
    (pods[0].folder / "log.txt").write_text("more")
    pods[0].settle()
    mirror_clock.now += 60
    pods[0].settle()
    assert pods[0].list_saved() == {*COMPLETE, "log.txt"}


def test_announced_shard_without_content_does_not_count(pods: list[MirrorRun], tmp_path: Path) -> None:
    save(pods, "step-1")
    pods[1].request(claim=True)
    pods[1].settle()
    shutil.rmtree(tmp_path / "store" / "objects")
    assert not pods[0].settle()
    assert not pods[0].list_saved()


def test_new_attempt_gets_every_shard_in_every_pod(
    pods: list[MirrorRun], tmp_path: Path, mirror_clock: MirrorClock
) -> None:
    save(pods, "step-1")
    pods[1].request(claim=True, flush=True)
    pods[0].request(flush=True)
    following = [MirrorRun(tmp_path, mirror_clock, 2, node=node, nodes=2) for node in (0, 1)]
    assert set(following[0].list_files()) == COMPLETE
    assert following[0].list_files() == following[1].list_files()


def test_restart_removes_an_interrupted_checkpoint_in_every_pod(pods: list[MirrorRun]) -> None:
    save(pods, "step-1")
    share(pods)
    for rank, pod in enumerate(pods):
        pod.save_shard("step-2", rank, "half")
    share(pods)
    assert [set(pod.list_files()) for pod in pods] == [COMPLETE, COMPLETE]
    save(pods, "step-2", "again")
    share(pods)
    assert len(pods[0].list_saved()) == 6
    assert pods[0].list_files() == pods[1].list_files()


def test_pod_that_dies_during_its_upload_leaves_the_snapshot_before(
    pods: list[MirrorRun], mirror_clock: MirrorClock
) -> None:
    save(pods, "step-1")
    share(pods)
    save(pods, "step-2")
    shutil.rmtree(pods[1].folder / "step-2")  # pod 1 is replaced before it has uploaded its shard
    share(pods)
    assert pods[0].list_saved() == COMPLETE
    assert [set(pod.list_files()) for pod in pods] == [COMPLETE, COMPLETE]


def test_shards_of_a_lost_pod_are_not_those_of_its_replacement(
    pods: list[MirrorRun], tmp_path: Path, mirror_clock: MirrorClock
) -> None:
    pods[1].save_shard("step-1", 1, "of the lost pod")
    pods[1].request(claim=True, flush=True)
    shutil.rmtree(pods[1].folder)
    pods[1] = MirrorRun(tmp_path, mirror_clock, node=1, nodes=2)
    share(pods)
    save(pods, "step-1")
    assert not pods[0].settle(), "the replacement has not uploaded its shard yet"
    share(pods)
    assert pods[1].list_files()["step-1/__1_0.distcp"] == b"x1"


def test_deleted_checkpoint_leaves_the_store(pods: list[MirrorRun], tmp_path: Path) -> None:
    for step in range(1, 5):
        save(pods, f"step-{step}", content=str(step))
        pods[1].request(claim=True)
        pods[1].settle()
        pods[0].settle()
        shutil.rmtree(pods[0].folder / f"step-{step - 1}", ignore_errors=True)
        shutil.rmtree(pods[1].folder / f"step-{step - 1}", ignore_errors=True)
    pods[1].settle()
    pods[0].settle()
    assert {path.partition("/")[0] for path in pods[0].list_saved()} == {"step-4"}
    manifests = list((tmp_path / "store" / "snapshots").glob("*.json"))
    needed = {digest for path in manifests for digest, _ in json.loads(path.read_text())["files"].values()}
    assert {path.name for path in (tmp_path / "store" / "objects").iterdir()} == needed


def test_prune_keeps_the_content_of_an_announced_shard(pods: list[MirrorRun], tmp_path: Path) -> None:
    pods[1].save_shard("step-1", 1, "early")
    pods[1].request(claim=True)
    pods[1].settle()
    (pods[0].folder / "log.txt").write_text("x")
    pods[0].settle()
    save(pods, "step-1", "early")
    (pods[1].folder / "step-1" / "__1_0.distcp").write_text("early")
    assert pods[0].settle()
    assert pods[0].list_saved() == {*COMPLETE, "log.txt"}


def test_lists_of_shards_are_limited_in_their_sum(pods: list[MirrorRun], monkeypatch: pytest.MonkeyPatch) -> None:
    pods[1].request(claim=True)
    save(pods, "step-1")
    pods[1].settle()
    size = sum(path.stat().st_size for path in (pods[0].root / "store" / "parts").iterdir())
    monkeypatch.setattr(snapshots, "_MAX_PARTS_BYTES", size - 1)
    assert not pods[0].settle()
    assert not pods[0].list_saved()
    assert "Delete old checkpoints in every pod" in pods[0].state.problem
    monkeypatch.setattr(snapshots, "_MAX_PARTS_BYTES", size)
    pods[0].clock.now += 60
    assert pods[0].settle()
    assert pods[0].list_saved() == COMPLETE


def test_partitions_of_zero_in_other_pods_are_refused(pods: list[MirrorRun]) -> None:
    folder = pods[0].folder / "global_step10"
    folder.mkdir()
    (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_text("x")
    with pytest.raises(UnusableStorage, match=r"global_step10/bf16_zero\S+ is a partition .*checkpoint\.claimName"):
        pods[0].settle()
    assert not pods[0].list_saved()


@pytest.mark.parametrize("is_published", [True, False])
def test_checkpoint_saved_again_in_the_same_folder_is_refused(pods: list[MirrorRun], is_published: bool) -> None:
    save(pods, "last")
    if is_published:
        pods[1].request(claim=True)
        pods[1].settle()
    pods[0].settle()
    save(pods, "last", "second")
    pods[0].save_list("last", save=1)
    with pytest.raises(UnusableStorage, match=r"last/\.metadata was saved again in the same folder"):
        pods[0].settle()


def test_shard_saved_again_in_the_same_folder_is_refused(pods: list[MirrorRun]) -> None:
    pods[1].request(claim=True)
    pods[1].save_shard("last", 1, "first")
    pods[1].settle()
    pods[1].save_shard("last", 1, "second")
    with pytest.raises(UnusableStorage, match="such as step-100"):
        pods[1].settle()


def test_pod_0_may_save_its_own_shards_again(pods: list[MirrorRun]) -> None:
    for save_id in range(2):
        for rank in (0, 1):
            pods[0].save_shard("last", rank, str(save_id))
        pods[0].save_list("last", save=save_id)
        assert pods[0].settle()
    assert len(pods[0].list_saved()) == 3


def test_superseded_pod_uploads_no_shards(pods: list[MirrorRun], tmp_path: Path, mirror_clock: MirrorClock) -> None:
    pods[1].request(claim=True)
    MirrorRun(tmp_path, mirror_clock, 2, nodes=2)
    pods[1].save_shard("step-1", 1, "x")
    with pytest.raises(PrefixSuperseded):
        pods[1].settle()
    assert not list((tmp_path / "store").glob("parts/*"))
