"""Files with copies."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddp_sdk.memory import copies
from ddp_sdk.memory.copies import (
    REPLICATED,
    CopyFile,
    NoRoomError,
    build_header,
    compute_checksum,
    decode_header,
    encode_header,
)


def write(file: CopyFile, step: int, content: torch.Tensor) -> None:
    memory = file.reserve(content.numel())
    memory.copy_(content)
    file.commit(build_header(REPLICATED, step, world=2, rank=0, payload=content.numel(), memory=memory))


CONTENT = (torch.arange(600_001) % 251).to(torch.uint8)


def test_copy_survives_the_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "state-0")
    write(CopyFile(path), 7, CONTENT)
    reader = CopyFile(path)
    header = reader.header
    assert header is not None
    assert (header.step, header.world, header.size) == (7, 2, CONTENT.numel())
    assert reader.verify()
    assert torch.equal(reader.open(), CONTENT)


def test_file_without_commit_contains_no_copy(tmp_path: Path) -> None:
    file = CopyFile(str(tmp_path / "state-0"))
    write(file, 7, CONTENT)
    file.reserve(CONTENT.numel()).copy_(CONTENT)
    assert CopyFile(file.path).header is None
    assert file.header is None


@pytest.mark.parametrize("position", [0, 262_144, 600_000], ids=["first", "second chunk", "odd tail"])
def test_changed_byte_is_detected(tmp_path: Path, position: int) -> None:
    file = CopyFile(str(tmp_path / "state-0"))
    write(file, 7, CONTENT)
    file.open()[position] ^= 1
    assert not CopyFile(file.path).verify()


def test_exchanged_chunks_are_detected() -> None:
    chunk = 8 << 15
    memory = torch.zeros(2 * chunk, dtype=torch.uint8)
    memory[:chunk] = 1
    assert compute_checksum(memory) != compute_checksum(memory.flip(0))


def test_header_with_a_changed_bit_is_invalid() -> None:
    encoded = bytearray(encode_header(copies.Header(REPLICATED, 7, 2, 0, 10, 20, 30, 1.5)))
    assert decode_header(bytes(encoded)) is not None
    encoded[9] ^= 1
    assert decode_header(bytes(encoded)) is None


def test_truncated_file_contains_no_copy(tmp_path: Path) -> None:
    file = CopyFile(str(tmp_path / "state-0"))
    write(file, 7, CONTENT)
    with open(file.path, "r+b") as raw:
        raw.truncate(5000)
    assert CopyFile(file.path).header is None


def test_larger_state_gets_another_allocation(tmp_path: Path) -> None:
    file = CopyFile(str(tmp_path / "state-0"))
    write(file, 7, CONTENT[:1000])
    write(file, 8, CONTENT)
    assert CopyFile(file.path).verify()


def test_full_memory_is_an_error_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "find_available", lambda folder: 1000)
    file = CopyFile(str(tmp_path / "state-0"))
    with pytest.raises(NoRoomError):
        file.reserve(CONTENT.numel())
    assert file.allocated == 0


@pytest.mark.parametrize(("fallocate", "registered"), [(True, True), (True, False), (False, False)])
def test_memory_is_reserved_pinned_and_released(
    fallocate: bool, registered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: calls.append("register") or int(not registered),
        cudaHostUnregister=lambda _: calls.append("unregister"),
    )
    monkeypatch.setattr(copies, "_runtime", lambda: runtime)
    file = CopyFile(str(tmp_path / "state-0"))
    file.pin()  # without memory there is nothing to register
    if not fallocate:

        def fail(*_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(NoRoomError):
            file.reserve(1000)
        assert file.allocated == 0
        return
    file.reserve(1000)
    file.pin()
    assert file.is_pinned is registered
    file.close()
    assert calls == (["register", "unregister"] if registered else ["register"])


def test_file_without_copy_cannot_be_opened(tmp_path: Path) -> None:
    file = CopyFile(str(tmp_path / "state-0"))
    file.invalidate()
    with pytest.raises(ValueError, match="contains no copy"):
        file.open()


@pytest.mark.parametrize(
    ("limit", "used", "cached", "available"),
    [
        ("1000", "400", "inactive_file 50\n", 650),
        ("max", "400", "", None),
        ("1000", "2000", "", 0),
        ("1000", "400", "x", 600),
    ],
)
def test_room_is_limited_by_the_container(
    limit: str, used: str, cached: str, available: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("max", limit), ("current", used), ("stat", cached)):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(copies, "_CGROUP", str(tmp_path))
    status = os.statvfs(tmp_path)
    expected = status.f_bavail * status.f_frsize if available is None else available
    assert copies.find_available(str(tmp_path)) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_planted_file_is_not_opened_and_replaced_by_the_first_copy(kind: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    write(CopyFile(str(victim)), 7, CONTENT)
    content = victim.read_bytes()
    file = CopyFile(str(tmp_path / "state-0"))
    if kind == "pipe":
        os.mkfifo(file.path)
    else:
        os.symlink(victim if kind == "link" else tmp_path / "none", file.path)
    file.invalidate()
    assert file.header is None
    write(file, 8, CONTENT)
    assert CopyFile(file.path).verify()
    assert victim.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state-0", "victim"]
