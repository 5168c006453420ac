"""A folder as an archive, and its content after unpacking in the pods."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest

from ddp_cli.client.packing.archive import CONFIG_MAP_LIMIT, pack
from ddp_cli.client.packing.files import CannotPack
from ddp_cli.client.packing.packed import pack_code
from ddp_operator.manifests.torchrun import split_user_command
from tests.unit.ddp_cli.client.packing.test_files import write


def test_same_files_give_same_archive(tmp_path: Path) -> None:
    archives = []
    for name in ("one", "two"):
        folder = tmp_path / name
        for path in ("train.py", "pkg/model.py", "run.sh") if name == "one" else ("run.sh", "pkg/model.py", "train.py"):
            write(folder, {path: f"content of {path}"})
            os.utime(folder / path, (1000, 1000 if name == "one" else 2000))
        (folder / "run.sh").chmod(0o700 if name == "one" else 0o755)
        archives.append(pack(folder))
    assert archives[0].data == archives[1].data
    assert archives[0].digest == archives[1].digest == hashlib.sha256(gzip.decompress(archives[0].data)).hexdigest()
    write(tmp_path / "two", {"pkg/model.py": "content of pkg/model.PY"})
    assert pack(tmp_path / "two").digest != archives[0].digest


def test_archive_has_contents_modes_and_links_without_owner_and_time(tmp_path: Path) -> None:
    long = "/".join(["a_long_name_of_a_folder"] * 6) + "/file.py"
    write(tmp_path, {"train.py": "x" * 1000, "empty": "", "größe.txt": "ü", long: "y", "run.sh": "#!/bin/sh"})
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("train.py")
    (tmp_path / "absolute").symlink_to(tmp_path / "a_long_name_of_a_folder")
    content = gzip.decompress(pack(tmp_path).data)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = archive.getmembers()
        for member in members:
            source = archive.extractfile(member) if member.isfile() else None
            assert (source.read() if source else b"") == ((tmp_path / member.name).read_bytes() if source else b"")
            assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
    results = {member.name: (oct(member.mode), member.linkname) for member in members}
    assert results["run.sh"] == ("0o755", "")
    assert results["train.py"] == ("0o644", "")
    assert (results["link"][1], results["absolute"][1]) == ("train.py", "a_long_name_of_a_folder")
    assert long in results
    assert "größe.txt" in results


def test_folder_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {f"images/{i}.png": "" for i in range(5)})
    monkeypatch.setattr("ddp_cli.client.packing.archive.MOST_FILES", 5)
    assert len(pack(tmp_path).sizes) == 5
    write(tmp_path, {"train.py": ""})
    with pytest.raises(CannotPack, match=r"more than 5 files; name data in \.ddpignore"):
        pack(tmp_path)


def test_link_out_of_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"code/train.py": "", "data/file": ""})
    (tmp_path / "code" / "data").symlink_to("../data")
    with pytest.raises(CannotPack, match=r"^data: this link points outside of the folder \(to .*/data\).*\.ddpignore"):
        pack(tmp_path / "code")
    write(tmp_path, {"code/.ddpignore": "/data"})
    assert [name for name, _ in pack(tmp_path / "code").sizes] == [".ddpignore", "train.py"]


def test_slightly_oversized_archive_is_compressed_harder(tmp_path: Path) -> None:
    far_repetition = random.Random(1).randbytes(100_000).hex()  # beyond the window of gzip
    write(tmp_path, {"train.py": 8 * far_repetition})
    easy = pack(tmp_path, limit=1 << 30)
    hard = pack(tmp_path, limit=len(easy.data) - 1)
    assert lzma.decompress(hard.data) == gzip.decompress(easy.data)
    assert (hard.digest, len(hard.data) < len(easy.data)) == (easy.digest, True)


def test_folder_too_large_for_config_map_names_largest_files(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(random.Random(1).randbytes(CONFIG_MAP_LIMIT * 3 // 2))
    write(tmp_path, {"train.py": ""})
    with pytest.raises(
        CannotPack, match=r"1\.5 MiB when packed.* at most 1\.0 MiB.* weights\.bin \(1\.5 MiB\), train\.py"
    ):
        pack_code(tmp_path).check_size()


def test_weights_large_files_and_left_out_secrets_are_described(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "", "best.PT": "x" * 2048, "vocab.bin": "x", "big.onnx": "x" * (3 << 20)})
    write(tmp_path, {f"{number}.pem": "" for number in range(7)})
    lines = pack_code(tmp_path).describe().splitlines()
    assert "big.onnx (3.0 MiB), best.PT (2 KiB);" in lines[1]
    assert "vocab" not in lines[1]
    assert "0.pem, 1.pem, 2.pem, 3.pem, 4.pem and 2 more;" in lines[2]


def test_empty_selection_is_refused(tmp_path: Path) -> None:
    for folder, words in ((tmp_path / "missing", "the folder does not exist"), (tmp_path, "nothing to pack")):
        with pytest.raises(CannotPack, match=words):
            pack(folder)


def test_commit_and_differences_are_reported(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "1"})
    assert pack(tmp_path).commit == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    archive = pack(tmp_path)
    assert (len(archive.commit), archive.dirty) == (40, False)
    write(tmp_path, {"new.py": ""})
    assert pack(tmp_path).dirty


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (["python", "train.py"], None),
        (["python", "-u", "./pkg/../train.py"], None),
        (["python", "pkg"], None),
        (["python", "-m", "pkg"], None),
        (["python", "/app/train.py"], None),
        (["bash", "-c", "true"], None),
        (["python", "main.py"], "runs main.py, which is not among the packed files"),
        (
            ["python", "./login.py"],
            "runs login.py, which is not packed because it may hold a secret; .* --include login.py",
        ),
    ],
)
def test_command_whose_script_is_not_packed_is_refused(
    tmp_path: Path, command: list[str], complaint: str | None
) -> None:
    write(tmp_path, dict.fromkeys(("train.py", "pkg/__main__.py"), "") | {"login.py": f"login('hf_{'aB' * 17}')"})
    code = pack_code(tmp_path)
    if complaint is None:
        code.check_command(split_user_command(command, []), None)
    else:
        with pytest.raises(CannotPack, match=complaint):
            code.check_command(split_user_command(command, []), None)
        code.check_command(split_user_command(command, []), "/elsewhere")


def test_requirements_are_used_only_if_present(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": ""})
    with pytest.raises(CannotPack, match=r"no requirements\.txt"):
        pack_code(tmp_path, pip=True)
    write(tmp_path, {"requirements.txt": ""})
    assert pack_code(tmp_path, pip=True).spec["pip"] == "requirements.txt"
