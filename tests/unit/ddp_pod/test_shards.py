"""Checkpoints of torch.distributed.checkpoint whose shards several pods write, in ``checkpoint.url``."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.contract.plan import CheckpointStoreConfig, encode_config
from ddp_pod.transfer import snapshots
from ddp_pod.transfer.checkpoints import NEWEST, MirrorConfig, MirrorEvent, MirrorRequest
from ddp_pod.transfer.mirror import Mirror
from ddp_pod.transfer.shards import find_missing_shards, has_shards, read_shard_names
from ddp_pod.transfer.snapshots import PrefixSuperseded
from ddp_pod.transfer.storage import UnusableStorage
from tests.support.launcher_config import launcher_pod
from tests.support.mirror_clock import MirrorClock


class PodMirror:
    """The mirror of one of two pods, with the test's clock."""

    def __init__(self, root: Path, clock: MirrorClock, node: int, attempt: int = 1) -> None:
        self.clock = clock
        self.root = root
        self.folder = root / f"ckpt-{attempt}-{node}"
        self.folder.mkdir(exist_ok=True)
        (root / "metrics").mkdir(exist_ok=True)
        pod = launcher_pod(root, node=node, nodes=2, checkpoint=CheckpointStoreConfig(f"file://{root}/store", 2))
        config = MirrorConfig(encode_config(pod), str(self.folder), attempt, f"job-{attempt}")
        self.events: list[MirrorEvent] = []
        self.mirror = Mirror(config, self.events.append)
        self.request(claim=node == 0, fetch=NEWEST)

    def request(self, **fields: Any) -> None:
        self.mirror._execute(MirrorRequest(1, **fields))

    def save_shard(self, checkpoint: str, rank: int, content: str) -> None:
        folder = self.folder / checkpoint
        folder.mkdir(exist_ok=True)
        (folder / f"__{rank}_0.distcp").write_text(content)

    def save_list(self, checkpoint: str, save: int = 0) -> None:
        names = [f"__{rank}_0.distcp" for rank in (0, 1)]
        (self.folder / checkpoint / ".metadata").write_bytes(pickle.dumps({"storage": names, "save": save}))

    def scan(self) -> bool:
        self.mirror._advance(final=False)
        self.clock.now += 3
        return self.mirror._advance(final=False)

    def read_snapshot(self) -> dict[str, Any]:
        """The newest manifest's files."""
        written = sorted((self.root / "store" / "snapshots").glob("*.json"))
        return dict(json.loads(written[-1].read_text())["files"]) if written else {}

    def read_problem(self) -> str:
        """The problem of the last report."""
        return next(event.state.problem for event in reversed(self.events) if event.state is not None)

    def list_files(self) -> dict[str, bytes]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}


COMPLETE = {"step-1/__0_0.distcp", "step-1/__1_0.distcp", "step-1/.metadata"}


@pytest.fixture
def pods(tmp_path: Path, mirror_clock: MirrorClock) -> list[PodMirror]:
    return [PodMirror(tmp_path, mirror_clock, node) for node in (0, 1)]


def save(pods: list[PodMirror], checkpoint: str, content: str = "x") -> None:
    for rank, pod in enumerate(pods):
        pod.save_shard(checkpoint, rank, f"{content}{rank}")
    pods[0].save_list(checkpoint)


def share(pods: list[PodMirror]) -> None:
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


def test_missing_shards_are_listed_by_folder() -> None:
    shards = {"a": ["__0_0.distcp", "__1_0.distcp"], "b": ["__0_0.distcp"]}
    existing = ["a/__0_0.distcp", "b/__0_0.distcp"]
    assert find_missing_shards(shards, existing) == {"a": ["a/__1_0.distcp"]}


def test_snapshot_has_the_shards_of_all_pods(pods: list[PodMirror]) -> None:
    save(pods, "step-1")
    pods[1].request(claim=True)
    assert pods[1].scan()
    assert pods[0].scan()
    assert set(pods[0].read_snapshot()) == COMPLETE


def test_checkpoint_without_a_shard_of_another_pod_is_not_published(
    pods: list[PodMirror], mirror_clock: MirrorClock
) -> None:
    save(pods, "step-1")
    (pods[0].folder / "log.txt").write_text("x")
    assert not pods[0].scan()
    mirror_clock.now += 60
    pods[0].scan()
    assert set(pods[0].read_snapshot()) == {"log.txt"}
    pods[1].request(claim=True)
    pods[1].scan()
    (pods[0].folder / "log.txt").write_text("more")
    pods[0].scan()
    mirror_clock.now += 60
    pods[0].scan()
    assert set(pods[0].read_snapshot()) == {*COMPLETE, "log.txt"}


def test_checkpoint_without_its_list_is_never_published(pods: list[PodMirror], mirror_clock: MirrorClock) -> None:
    pods[0].save_shard("step-1", 0, "x")
    pods[0].scan()
    mirror_clock.now += 60
    pods[0].scan()
    pods[0].request(flush=True)
    assert pods[0].read_snapshot() == {}


def test_announced_shard_without_content_does_not_count(pods: list[PodMirror], tmp_path: Path) -> None:
    save(pods, "step-1")
    pods[1].request(claim=True)
    pods[1].scan()
    shutil.rmtree(tmp_path / "store" / "objects")
    assert not pods[0].scan()
    assert pods[0].read_snapshot() == {}


def test_new_attempt_gets_every_shard_in_every_pod(
    pods: list[PodMirror], tmp_path: Path, mirror_clock: MirrorClock
) -> None:
    save(pods, "step-1")
    pods[1].request(claim=True, flush=True)
    pods[0].request(flush=True)
    following = [PodMirror(tmp_path, mirror_clock, node, attempt=2) for node in (0, 1)]
    assert set(following[0].list_files()) == COMPLETE
    assert following[0].list_files() == following[1].list_files()


def test_restart_removes_an_interrupted_checkpoint_in_every_pod(pods: list[PodMirror]) -> None:
    save(pods, "step-1")
    share(pods)
    for rank, pod in enumerate(pods):
        pod.save_shard("step-2", rank, "half")
    share(pods)
    assert [set(pod.list_files()) for pod in pods] == [COMPLETE, COMPLETE]
    save(pods, "step-2", "again")
    share(pods)
    assert len(pods[0].read_snapshot()) == 6
    assert pods[0].list_files() == pods[1].list_files()


def test_pod_that_dies_during_its_upload_leaves_the_snapshot_before(
    pods: list[PodMirror], mirror_clock: MirrorClock
) -> None:
    save(pods, "step-1")
    share(pods)
    save(pods, "step-2")
    shutil.rmtree(pods[1].folder / "step-2")  # pod 1 is replaced before it has uploaded its shard
    share(pods)
    assert set(pods[0].read_snapshot()) == COMPLETE
    assert [set(pod.list_files()) for pod in pods] == [COMPLETE, COMPLETE]


def test_shards_of_a_lost_pod_are_not_those_of_its_replacement(
    pods: list[PodMirror], tmp_path: Path, mirror_clock: MirrorClock
) -> None:
    pods[1].save_shard("step-1", 1, "of the lost pod")
    pods[1].request(claim=True, flush=True)
    shutil.rmtree(pods[1].folder)
    pods[1] = PodMirror(tmp_path, mirror_clock, 1)
    share(pods)
    save(pods, "step-1")
    assert not pods[0].scan(), "the replacement has not uploaded its shard yet"
    share(pods)
    assert pods[1].list_files()["step-1/__1_0.distcp"] == b"x1"


def test_deleted_checkpoint_leaves_the_store(pods: list[PodMirror], tmp_path: Path) -> None:
    for step in range(1, 5):
        save(pods, f"step-{step}", content=str(step))
        pods[1].request(claim=True)
        pods[1].scan()
        pods[0].scan()
        shutil.rmtree(pods[0].folder / f"step-{step - 1}", ignore_errors=True)
        shutil.rmtree(pods[1].folder / f"step-{step - 1}", ignore_errors=True)
    pods[1].scan()
    pods[0].scan()
    assert {path.partition("/")[0] for path in pods[0].read_snapshot()} == {"step-4"}
    manifests = list((tmp_path / "store" / "snapshots").glob("*.json"))
    needed = {digest for path in manifests for digest, _ in json.loads(path.read_text())["files"].values()}
    assert {path.name for path in (tmp_path / "store" / "objects").iterdir()} == needed


def test_prune_keeps_the_content_of_an_announced_shard(pods: list[PodMirror], tmp_path: Path) -> None:
    pods[1].save_shard("step-1", 1, "early")
    pods[1].request(claim=True)
    pods[1].scan()
    (pods[0].folder / "log.txt").write_text("x")
    pods[0].scan()
    save(pods, "step-1", "early")
    (pods[1].folder / "step-1" / "__1_0.distcp").write_text("early")
    assert pods[0].scan()
    assert set(pods[0].read_snapshot()) == {*COMPLETE, "log.txt"}


def test_lists_of_shards_are_limited_in_their_sum(pods: list[PodMirror], monkeypatch: pytest.MonkeyPatch) -> None:
    pods[1].request(claim=True)
    save(pods, "step-1")
    pods[1].scan()
    size = sum(path.stat().st_size for path in (pods[0].root / "store" / "parts").iterdir())
    monkeypatch.setattr(snapshots, "_MAX_PARTS_BYTES", size - 1)
    assert not pods[0].scan()
    assert pods[0].read_snapshot() == {}
    assert "Delete old checkpoints in every pod" in pods[0].read_problem()
    monkeypatch.setattr(snapshots, "_MAX_PARTS_BYTES", size)
    pods[0].clock.now += 60
    assert pods[0].scan()
    assert set(pods[0].read_snapshot()) == COMPLETE


@pytest.mark.parametrize("kind", ["optim_states", "model_states"])
def test_partitions_of_zero_in_other_pods_are_refused(pods: list[PodMirror], kind: str) -> None:
    folder = pods[0].folder / "global_step10"
    folder.mkdir()
    (folder / f"bf16_zero_pp_rank_0_mp_rank_00_{kind}.pt").write_text("x")
    with pytest.raises(UnusableStorage, match=r"global_step10/bf16_zero\S+ is a partition .*checkpoint\.claimName"):
        pods[0].scan()
    assert pods[0].read_snapshot() == {}


@pytest.mark.parametrize("is_published", [True, False])
def test_checkpoint_saved_again_in_the_same_folder_is_refused(pods: list[PodMirror], is_published: bool) -> None:
    save(pods, "last")
    if is_published:
        pods[1].request(claim=True)
        pods[1].scan()
    pods[0].scan()
    save(pods, "last", "second")
    pods[0].save_list("last", save=1)
    with pytest.raises(UnusableStorage, match=r"last/\.metadata was saved again in the same folder"):
        pods[0].scan()


def test_shard_saved_again_in_the_same_folder_is_refused(pods: list[PodMirror]) -> None:
    pods[1].request(claim=True)
    pods[1].save_shard("last", 1, "first")
    pods[1].scan()
    pods[1].save_shard("last", 1, "second")
    with pytest.raises(UnusableStorage, match="such as step-100"):
        pods[1].scan()


def test_pod_0_may_save_its_own_shards_again(pods: list[PodMirror]) -> None:
    for save_id in range(2):
        for rank in (0, 1):
            pods[0].save_shard("last", rank, str(save_id))
        pods[0].save_list("last", save=save_id)
        assert pods[0].scan()
    assert len(pods[0].read_snapshot()) == 3


def test_superseded_pod_uploads_no_shards(pods: list[PodMirror], tmp_path: Path, mirror_clock: MirrorClock) -> None:
    pods[1].request(claim=True)
    PodMirror(tmp_path, mirror_clock, 0, attempt=2)
    pods[1].save_shard("step-1", 1, "x")
    with pytest.raises(PrefixSuperseded):
        pods[1].scan()
    assert not list((tmp_path / "store").glob("parts/*"))
