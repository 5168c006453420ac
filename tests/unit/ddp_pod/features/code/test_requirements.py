"""The digest of requirements changes with every file that pip reads for them, and with no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_pod.contract.plan import CodeConfig
from ddp_pod.features.code.requirements import digest_requirements

BASE = "requirements/base.txt"
WHEEL = "wheels/tiny-1.0-py3-none-any.whl"
PROJECT = "lib/pyproject.toml"


def compute_digest(folder: Path, archive: str = "a") -> str:
    code = CodeConfig("", archive, str(folder), "requirements.txt", "")
    return digest_requirements(str(folder / "requirements.txt"), code)


def write(folder: Path, name: str, data: bytes) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("torch", "requirements.txt"),
        (f"-r {BASE}", BASE),
        (f"-r{BASE}\r\n", BASE),
        (f"--requirement={BASE}  # the base", BASE),
        (f"-r \\\n  {BASE}", BASE),
        (f"-c '{BASE}'", BASE),
        ("-r $KIND/base.txt", BASE),
        ("-r requirements/middle.txt", BASE),
        (f"./{WHEEL} ; python_version > '3'", WHEEL),
        (f"{WHEEL}[extra] --hash=sha256:0", WHEEL),
        ("tiny @ file://{folder}/wheels/tiny-1.0-py3%2Dnone-any.whl", WHEEL),
        ("--find-links wheels\ntiny", WHEEL),
        ("-f ./wheels", WHEEL),
        ("-e lib[dev]", PROJECT),
        ("--editable=./lib", PROJECT),
        (f"-r {BASE}".encode("utf-8-sig"), BASE),
        (f"-r {BASE}".encode("utf-16"), BASE),
        (f"-r {BASE}".encode("utf-32"), BASE),
    ],
)
def test_digest_changes_with_file_that_pip_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes, changed: str
) -> None:
    monkeypatch.setenv("KIND", "requirements")
    for name in (WHEEL, PROJECT, "lib/lib.py", "train.py", BASE):
        write(tmp_path, name, b"1")
    write(tmp_path, "requirements/middle.txt", b"-r base.txt\n-r ../requirements.txt")
    write(tmp_path, "requirements.txt", text.format(folder=tmp_path).encode() if isinstance(text, str) else text)
    first = compute_digest(tmp_path)
    write(tmp_path, "train.py", b"2")
    write(tmp_path, "lib/lib.py", b"2")
    assert compute_digest(tmp_path) == first
    write(tmp_path, changed, b"2")
    assert compute_digest(tmp_path) != first


@pytest.mark.parametrize(("text", "is_copied"), [(".", True), ("-e .", False), ("./lib", True), ("numpy", False)])
def test_packed_project_is_installed_again_with_new_code_unless_it_is_editable(
    tmp_path: Path, text: str, is_copied: bool
) -> None:
    for name in ("setup.py", PROJECT, "numpy/setup.py"):
        write(tmp_path, name, b"")
    write(tmp_path, "requirements.txt", text.encode())
    assert (compute_digest(tmp_path, "a") != compute_digest(tmp_path, "b")) is is_copied


def test_files_of_image_count_by_size_and_time(tmp_path: Path) -> None:
    write(tmp_path, "image/tiny-1.0.tar.gz", b"1")
    write(tmp_path, "code/requirements.txt", f"{tmp_path}/image/tiny-1.0.tar.gz\n-r https://h/r.txt".encode())
    first = compute_digest(tmp_path / "code")
    os.utime(tmp_path / "image" / "tiny-1.0.tar.gz", (1, 1))
    second = compute_digest(tmp_path / "code")
    os.mkfifo(tmp_path / "code" / "pipe")
    write(tmp_path, "code/requirements.txt", b"-r pipe\n./pipe\n-f pipe\n./missing.whl")
    assert len({first, second, compute_digest(tmp_path / "code")}) == 3
