"""Snapshots of a folder in a store: atomic, and written by one attempt at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ddp_pod.features.mirror.snapshots import (
    ChangedFile,
    CheckpointSnapshot,
    DamagedSnapshot,
    FileContent,
    PrefixSuperseded,
    SnapshotStore,
    hash_file,
)
from ddp_pod.transfer.sources import UnusableStorage, open_storage


class Attempt:
    """An attempt with a separate folder."""

    def __init__(self, root: Path, number: int, *, job: str = "job", keep: int = 3) -> None:
        system, path = open_storage(f"file://{root}/store")
        self.store = SnapshotStore(system, path, number, f"{job}-{number}", keep)
        self.folder = root / f"{job}-{number}"
        self.folder.mkdir(exist_ok=True)
        self.store.claim()

    def files(self) -> dict[str, FileContent]:
        contents = {}
        for path in self.folder.rglob("*"):
            if path.is_file():
                contents[str(path.relative_to(self.folder))] = FileContent(hash_file(str(path)), path.stat().st_size)
        return contents

    def save(self, step: int, **files: str) -> CheckpointSnapshot:
        for name, text in files.items():
            (self.folder / name).write_text(text)
        self.store.upload(str(self.folder), self.files())
        return self.store.write(self.files(), step)

    def fetch(self) -> CheckpointSnapshot | None:
        return self.store.fetch_newest(str(self.folder))


def objects(root: Path) -> list[Path]:
    return sorted((root / "store" / "objects").iterdir())


def test_next_attempt_fetches_newest_snapshot(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1)
    first.save(1, a="1", b="same")
    first.save(2, a="2")
    second = Attempt(tmp_path, 2)
    snapshot = second.fetch()
    assert snapshot is not None
    assert snapshot.step == 2
    assert second.files() == first.files()


def test_unchanged_file_is_uploaded_once(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1)
    first.save(1, a="x" * 1000)
    first.save(2, b="yy")
    assert first.store.bytes == 1002
    (_, written) = sorted((tmp_path / "store/snapshots").iterdir())
    manifest = json.loads(written.read_text())
    assert (manifest["step"], manifest["attempt"], manifest["runId"]) == (2, 1, "job-1")


def test_snapshots_are_ordered_by_claim_before_number(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1)
    for step in range(1, 4):
        first.save(step, a=str(step))
    Attempt(tmp_path, 2).save(2, a="of the second attempt")
    snapshot = Attempt(tmp_path, 3).fetch()
    assert snapshot is not None
    assert snapshot.name == "000000002-000000001"


class TestPrefixFence:
    @pytest.mark.parametrize(("job", "number", "owner"), [("job", 2, "attempt 2"), ("other", 1, "another job")])
    def test_superseded_attempt_writes_and_removes_nothing(
        self, tmp_path: Path, job: str, number: int, owner: str
    ) -> None:
        first = Attempt(tmp_path, 1, keep=1)
        first.save(1, a="1")
        first.save(2, a="2")
        Attempt(tmp_path, number, job=job)
        with pytest.raises(PrefixSuperseded, match=owner) as caught:
            first.save(3, a="3")
        assert caught.value.same_job is (job == "job")
        with pytest.raises(PrefixSuperseded):
            first.store.prune()
        assert len(first.store.list()) == 2
        assert {path.name for path in objects(tmp_path)} >= {first.files()["a"].digest}

    def test_earlier_attempt_cannot_claim_after_later_one(self, tmp_path: Path) -> None:
        Attempt(tmp_path, 2)
        with pytest.raises(PrefixSuperseded):
            Attempt(tmp_path, 1)

    def test_restarted_process_keeps_claim(self, tmp_path: Path) -> None:
        first = Attempt(tmp_path, 1)
        written = first.save(1, a="1")
        again = Attempt(tmp_path, 1)
        assert again.store.claim() == written
        assert again.save(2, a="2").name == "000000001-000000002"

    def test_later_attempt_wins_of_two_concurrent_claims(self, tmp_path: Path) -> None:
        first = Attempt(tmp_path, 1)
        # Both attempts list before either writes.
        (tmp_path / "store/fence/000000001-000000002-job-2.json").write_text("{}")
        with pytest.raises(PrefixSuperseded):
            first.store.check()
        second = Attempt(tmp_path, 2)
        second.store.check()


class TestDamage:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Attempt:
        first = Attempt(tmp_path, 1)
        first.save(1, a="old one")
        first.save(2, a="new one")
        return first

    def expect(self, root: Path, step: int | None, attempt: int = 2) -> Attempt:
        following = Attempt(root, attempt)
        snapshot = following.fetch()
        assert (snapshot and snapshot.step) == step
        return following

    @pytest.mark.parametrize("content", ["new 0ne", "new", None], ids=["corrupt", "truncated", "missing"])
    def test_snapshot_with_damaged_object_is_skipped_and_uploaded_again(
        self, tmp_path: Path, saved: Attempt, capsys: pytest.CaptureFixture[str], content: str | None
    ) -> None:
        damaged = tmp_path / "store" / "objects" / saved.files()["a"].digest
        damaged.unlink()
        if content is not None:
            damaged.write_text(content)
        second = self.expect(tmp_path, 1)
        assert [(path.name, path.read_text()) for path in second.folder.iterdir()] == [("a", "old one")]
        assert "snapshot 000000001-000000002" in capsys.readouterr().err
        with pytest.raises(DamagedSnapshot):
            second.store.fetch("000000001-000000002", str(second.folder))
        second.save(3, a="new one")
        assert (self.expect(tmp_path, 3, attempt=3).folder / "a").read_text() == "new one"

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", '{"files": {"../x": ["0", 1]}, "step": 1, "time": 1, "version": 1}']
    )
    def test_unreadable_manifest_is_skipped(self, tmp_path: Path, saved: Attempt, text: str) -> None:
        (tmp_path / "store/snapshots/000000001-000000002.json").write_text(text)
        self.expect(tmp_path, 1)

    def test_no_intact_snapshot_fetches_none(self, tmp_path: Path, saved: Attempt) -> None:
        shutil.rmtree(tmp_path / "store/objects")
        self.expect(tmp_path, None)


class TestPrune:
    def test_prune_keeps_newest_snapshots_and_their_objects(self, tmp_path: Path) -> None:
        first = Attempt(tmp_path, 1, keep=2)
        for step in range(1, 5):
            first.save(step, a=str(step), b="same")
            first.store.prune()
        assert [name[-1] for name in first.store.list()] == ["3", "4"]
        assert len(objects(tmp_path)) == 3

    def test_prune_removes_objects_of_killed_attempt(self, tmp_path: Path) -> None:
        first = Attempt(tmp_path, 1)
        first.save(1, a="1")
        (first.folder / "a").write_text("2")
        first.store.upload(str(first.folder), first.files())
        second = Attempt(tmp_path, 2)
        second.store.prune()
        assert len(objects(tmp_path)) == 1


def test_file_changed_during_upload_is_reported(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1)
    (first.folder / "a").write_text("1")
    before = first.files()
    (first.folder / "a").write_text("longer")
    with pytest.raises(ChangedFile):
        first.store.upload(str(first.folder), before)
    (first.folder / "a").unlink()
    with pytest.raises(ChangedFile):
        first.store.upload(str(first.folder), before)
    assert objects(tmp_path) == []


def test_snapshot_with_missing_object_is_not_written(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1)
    (first.folder / "a").write_text("1")
    with pytest.raises(OSError, match="lacks uploaded files"):
        first.store.write(first.files(), 1)


@pytest.mark.parametrize(("url", "words"), [("nowhere://x/y", "cannot be opened"), ("adl://x/y", "needs .*package")])
def test_url_without_driver_is_explained(url: str, words: str) -> None:
    with pytest.raises(UnusableStorage, match=words):
        open_storage(url)
