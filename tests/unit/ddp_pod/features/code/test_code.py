"""The submitted code folder in a pod: unpacking, its digest, and its packages."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from ddp_cli.client.packing.archive import pack
from ddp_pod.base.pod import PodSetupError
from ddp_pod.contract.plan import CodeConfig
from ddp_pod.features.code.unpack import ArchiveNames, check_archive, install_packages, prepare_code, unpack
from tests.support.wheels import make_wheel
from tests.unit.ddp_cli.client.packing.test_files import write


def config(tmp_path: Path, data: bytes, digest: str, requirements: str | None = None) -> CodeConfig:
    (tmp_path / "code.tar.gz").write_bytes(data)
    (tmp_path / "workspace").mkdir(exist_ok=True)
    archive, folder, packages = (str(tmp_path / name) for name in ("code.tar.gz", "workspace", "packages"))
    return CodeConfig(archive, digest, folder, requirements, packages)


def packed(tmp_path: Path, requirements: str | None = None) -> CodeConfig:
    archive = pack(tmp_path / "source")
    return config(tmp_path, archive.data, archive.digest, requirements)


def tar(*members: tarfile.TarInfo) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return content.getvalue()


def test_unpacked_folder_equals_packed_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(source, {"train.py": "print(1)", "pkg/sub/model.py": "x" * 5000, "run.sh": "", "empty": ""})
    (source / "run.sh").chmod(0o755)
    (source / "pkg" / "link").symlink_to("../train.py")
    code = packed(tmp_path)
    assert unpack(code) == 5
    copy = Path(code.folder)
    for file in (file for file in source.rglob("*") if file.is_file()):
        assert (copy / file.relative_to(source)).read_bytes() == file.read_bytes()
    assert os.access(copy / "run.sh", os.X_OK)
    assert not os.access(copy / "empty", os.X_OK)
    assert os.readlink(copy / "pkg" / "link") == "../train.py"
    assert unpack(code) == 5, "a second pod replaces the files"


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_both_compressions_are_read_and_other_digest_is_refused(tmp_path: Path, compress: object) -> None:
    assert callable(compress)
    content = tar(tarfile.TarInfo("train.py"))
    code = config(tmp_path, compress(content), hashlib.sha256(content).hexdigest())
    assert unpack(code) == 1
    (tmp_path / "code.tar.gz").write_bytes(compress(content + bytes(512)))
    with pytest.raises(PodSetupError, match="is not the submitted archive") as refusal:
        unpack(code)
    assert refusal.value.exit_code == 81
    assert [path.name for path in Path(code.folder).iterdir()] == ["train.py"]


def sparse_header() -> bytes:
    """Return an archive with an extended header whose number is none."""
    member = tarfile.TarInfo("train.py")
    member.pax_headers = {"GNU.sparse.map": "none"}
    return tar(member)


def test_missing_or_damaged_archive_is_reported(tmp_path: Path) -> None:
    content = gzip.compress(tar(tarfile.TarInfo("train.py")))
    code = config(tmp_path, content[: len(content) // 2], "0" * 64)
    damaged_stream = bytearray(gzip.compress(tar(tarfile.TarInfo("train.py")) + random.Random(1).randbytes(1 << 20)))
    damaged_stream[len(damaged_stream) // 2 :] = bytes(len(damaged_stream) // 2)
    for damage in (content[: len(content) // 2], b"no archive", bytes(damaged_stream)):
        Path(code.archive).write_bytes(damage)
        with pytest.raises(PodSetupError, match="is damaged"):
            unpack(code)
    invalid = config(tmp_path, gzip.compress(sparse_header()), hashlib.sha256(sparse_header()).hexdigest())
    with pytest.raises(PodSetupError, match="is damaged"):
        unpack(invalid)
    Path(code.archive).unlink()
    with pytest.raises(PodSetupError, match=r"^cannot read the code archive .*: No such file or directory") as refusal:
        unpack(code)
    assert refusal.value.exit_code == 81
    os.mkfifo(code.archive)
    with pytest.raises(PodSetupError, match="is not a file"):  # without waiting for a writer
        unpack(code)


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = tarfile.SYMTYPE
    member.linkname = target
    return member


def device() -> tarfile.TarInfo:
    member = tarfile.TarInfo("device")
    member.type = tarfile.CHRTYPE
    return member


@pytest.mark.parametrize(
    "members",
    [
        [tarfile.TarInfo("../outside")],
        [tarfile.TarInfo("a/../../outside")],
        [tarfile.TarInfo("/tmp/ddp-outside")],
        [link("out", "/etc/passwd")],
        [link("out", "../..")],
        [link("sub", "."), tarfile.TarInfo("sub/../../outside")],
        [tarfile.TarInfo("train.py"), tarfile.TarInfo("../outside/deep/file")],
        [tarfile.TarInfo("train.py"), tarfile.TarInfo("/tmp/ddp-outside/deep/file")],
        [tarfile.TarInfo("train.py"), link("x/y/z", "../.."), link("k", "x/y/z/../outside")],
        [tarfile.TarInfo("train.py"), link("sub", "other"), tarfile.TarInfo("sub/outside/file")],
        [link("a", "b"), link("b", "a")],
        [tarfile.TarInfo("train.py"), tarfile.TarInfo("./train.py")],
        [device()],
    ],
)
def test_nothing_is_written_outside_of_the_folder(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    content = tar(*members)
    code = config(tmp_path, gzip.compress(content), hashlib.sha256(content).hexdigest())
    problems = r"outside of the folder|neither a file nor a link|is below a file|train.py twice"
    with pytest.raises(PodSetupError, match=problems):
        unpack(code)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["code.tar.gz", "workspace"]
    assert not [*tmp_path.glob("outside*"), *tmp_path.parent.glob("outside*"), *Path("/tmp").glob("ddp-outside")]


def test_archive_beyond_limits_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = tarfile.TarInfo("large")
    large.size = 5000
    content = tar(tarfile.TarInfo("train.py"), large)
    code = config(tmp_path, gzip.compress(content), hashlib.sha256(content).hexdigest())
    for name, limit in (("_MOST_BYTES", 4999), ("_MOST_NAMES", 300)):
        with monkeypatch.context() as patch:
            patch.setattr(f"ddp_pod.features.code.unpack.{name}", limit)
            with pytest.raises(PodSetupError, match="the archive has more than"):
                unpack(code)
    assert list(Path(code.folder).iterdir()) == []
    assert unpack(code) == 2


def extended(kind: bytes, size: int) -> bytes:
    """Return an extension of a header: PAX (x, g) or a long name (L)."""
    header = tarfile.TarInfo("extension")
    header.type = kind
    header.size = size
    body = b"1000000 a=" if kind in b"xg" else b""
    return header.tobuf() + (body + b"b" * size)[:size].ljust(-(-size // 512) * 512, b"\0")


SPARSE = tarfile.TarInfo("sparse")
SPARSE.type = tarfile.GNUTYPE_SPARSE


@pytest.mark.parametrize(
    "content",
    [
        extended(b"x", 50 << 20) + tar(tarfile.TarInfo("a")),
        extended(b"L", 50 << 20) + tar(tarfile.TarInfo("a")),
        tar(tarfile.TarInfo("a"))[:512] + extended(b"g", 50 << 20) + tar(tarfile.TarInfo("b")),
        extended(b"L", 10) * 90_000 + tar(tarfile.TarInfo("a")),
        extended(b"g", 40) * 3 + tar(tarfile.TarInfo("a")),
        tar(tarfile.TarInfo("a")) + bytes(50 << 20),
        tar(SPARSE),
    ],
    ids=["pax", "long name", "global", "nested", "small global", "after the end", "sparse"],
)
def test_headers_take_bounded_memory(tmp_path: Path, content: bytes) -> None:
    code = config(tmp_path, gzip.compress(content, 1), hashlib.sha256(content).hexdigest())
    tracemalloc.start()
    with pytest.raises(PodSetupError, match="is damaged"):
        unpack(code)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert list(Path(code.folder).iterdir()) == []


@pytest.mark.parametrize("is_submitted", [True, False])
def test_many_long_names_take_bounded_memory(tmp_path: Path, is_submitted: bool) -> None:
    """One character beyond Latin-1 makes Python store a whole name with four bytes per character."""
    longest = "\U0001f600" + "a" * 3900
    members = [*(tarfile.TarInfo(f"{i}{longest}") for i in range(4)), *(link(f"{i}", longest) for i in range(4000))]
    content = tar(*members)
    digest = hashlib.sha256(content).hexdigest() if is_submitted else "0" * 64
    code = config(tmp_path, gzip.compress(content, 1), digest)
    members.clear()
    tracemalloc.start()
    if is_submitted:
        check_archive(code)
    else:
        with pytest.raises(PodSetupError, match="is not the submitted archive"):
            check_archive(code)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (24 << 20 if is_submitted else 4 << 20)


def test_archive_that_is_swapped_after_its_check_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = tar(tarfile.TarInfo("submitted"))
    code = config(tmp_path, gzip.compress(submitted), hashlib.sha256(submitted).hexdigest())
    check = ArchiveNames.check

    def swap(names: ArchiveNames) -> None:
        check(names)
        Path(code.archive).write_bytes(gzip.compress(tar(tarfile.TarInfo("other"))))

    monkeypatch.setattr(ArchiveNames, "check", swap)
    assert unpack(code) == 1
    assert [path.name for path in Path(code.folder).iterdir()] == ["submitted"]


def test_link_of_former_pod_does_not_lead_out_of_folder(tmp_path: Path) -> None:
    content = tar(tarfile.TarInfo("sub/deep/file"))
    code = config(tmp_path, gzip.compress(content), hashlib.sha256(content).hexdigest())
    (tmp_path / "outside").mkdir()
    Path(code.folder, "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(PodSetupError, match="sub/deep/file is outside of the folder"):
        unpack(code)
    assert list((tmp_path / "outside").iterdir()) == []


def test_full_disk_is_retryable(tmp_path: Path) -> None:
    content = tar(tarfile.TarInfo("train.py"))
    code = config(tmp_path, gzip.compress(content), hashlib.sha256(content).hexdigest())
    (tmp_path / "workspace").rmdir()
    (tmp_path / "workspace").symlink_to("/dev/full")
    with pytest.raises(PodSetupError, match="cannot unpack the code") as refusal:
        unpack(code)
    assert refusal.value.exit_code == 82


def test_packages_are_installed_beside_packages_of_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    make_wheel(tmp_path / "source" / "wheels" / "ddp_tiny-1.5-py3-none-any.whl", "ddp_tiny", "1.5")
    # PyYAML is installed already: pip has no index from which to install it again.
    write(tmp_path / "source", {"requirements.txt": "./wheels/ddp_tiny-1.5-py3-none-any.whl\npyyaml>=5\n"})
    code = packed(tmp_path, "requirements.txt")
    prepare_code(code, [])
    log = capfd.readouterr().err
    assert "unpacked code" in log
    assert "Successfully installed ddp_tiny-1.5" in log.replace("ddp-tiny", "ddp_tiny")
    seen = subprocess.run(
        [sys.executable, "-c", "import ddp_tiny, yaml; print(ddp_tiny.VERSION, ddp_tiny.__file__)"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert seen.startswith(f"1.5 {code.packages}")
    assert os.environ["PATH"].startswith(f"{code.packages}/venv/bin:")


def test_packages_are_installed_again_only_for_other_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("PYTHONPATH", "PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for version in ("1.5", "2.0"):
        make_wheel(tmp_path / f"ddp_tiny-{version}-py3-none-any.whl", "ddp_tiny", version)
    installed = []
    for version in ("1.5", "1.5", "2.0"):
        write(tmp_path / "source", {"requirements.txt": f"{tmp_path}/ddp_tiny-{version}-py3-none-any.whl\n"})
        installed.append(prepare_code(packed(tmp_path, "requirements.txt"), []))
        seen = subprocess.run(
            [sys.executable, "-c", "import ddp_tiny; print(ddp_tiny.VERSION)"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert seen.strip() == version
    assert installed == [True, False, True]
    assert capfd.readouterr().err.count("pip install -r") == 2
    assert os.environ["PATH"].count("packages/venv/bin") == 1


def test_next_archive_replaces_files_of_the_former_and_keeps_those_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    write(tmp_path / "source", {"train.py": "import part\n", "part.py": "VALUE = 1\n", "old/gone.py": "\n"})
    former = packed(tmp_path)
    unpack(former)
    folder = Path(former.folder)
    show = [sys.executable, "-c", "import part; print(part.VALUE)"]
    assert subprocess.run(show, cwd=folder, check=True, capture_output=True, text=True).stdout == "1\n"
    (folder / "checkpoint.pt").write_text("of a run")
    kept = shutil.copy(former.archive, tmp_path / "former.tar.gz")

    shutil.rmtree(tmp_path / "source")
    write(tmp_path / "source", {"train.py": "import part\n", "part.py": "VALUE = 2\n"})
    stamp = (folder / "part.py").stat().st_mtime
    unpack(packed(tmp_path), str(kept))
    os.utime(folder / "part.py", (stamp, stamp))  # saved again within the resolution of bytecode's time stamps
    assert subprocess.run(show, cwd=folder, check=True, capture_output=True, text=True).stdout == "2\n"
    assert not (folder / "old/gone.py").exists()
    assert (folder / "checkpoint.pt").read_text() == "of a run"


@pytest.mark.nightly
def test_package_without_distribution_is_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    write(tmp_path / "source", {"requirements.txt": "ddp-no-such-package==1\n"})
    code = packed(tmp_path, "requirements.txt")
    with pytest.raises(PodSetupError, match="No matching distribution found for ddp-no-such-package==1") as refusal:
        prepare_code(code, [])
    assert refusal.value.exit_code == 81
    assert "requirements.txt" in refusal.value.hint
    assert "ERROR" in refusal.value.output


def test_signal_stops_pip_and_missing_requirements_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "source", {"requirements.txt": ""})
    code = packed(tmp_path, "requirements.txt")
    unpack(code)
    with pytest.raises(PodSetupError, match="asked to stop") as end:
        install_packages(code, [signal.SIGTERM])
    assert end.value.exit_code == 85
    with pytest.raises(PodSetupError, match=r"the submitted code has no other\.txt"):
        prepare_code(dataclasses.replace(code, requirements="other.txt"), [])
