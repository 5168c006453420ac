"""The libraries of the pages are those of the npm registry, in pinned versions and with their licences."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.features.ui.render import STATIC

VENDORED: dict[str, Any] = json.loads((STATIC / "vendor.json").read_text())
FOREIGN = {name for package in VENDORED.values() for name in package["files"]}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_every_minified_file_is_pinned_and_has_a_licence() -> None:
    assert {path.name for path in STATIC.iterdir() if ".min." in path.name} == FOREIGN
    for package in VENDORED.values():
        for name, expected in package["files"].items():
            assert digest((STATIC / name).read_bytes()) == expected
    assert {path.name for path in (STATIC / "licenses").iterdir()} == {"uPlot.txt", "idiomorph.txt"}


def test_assets_stay_below_300_kilobytes() -> None:
    assert sum(path.stat().st_size for path in Path(str(STATIC)).rglob("*") if path.is_file()) < 300_000


@pytest.mark.parametrize("name", VENDORED)
def test_files_are_those_of_the_registry(name: str, tmp_path: Path) -> None:
    package = VENDORED[name]
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed; it reads the registry")
    command = [npm, "pack", f"{name}@{package['version']}", "--silent"]
    packed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if packed.returncode:
        pytest.skip(f"the npm registry cannot be read: {packed.stderr.strip()[-200:]}")
    data = (tmp_path / packed.stdout.strip()).read_bytes()
    assert f"sha512-{base64.b64encode(hashlib.sha512(data).digest()).decode()}" == package["integrity"]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for file, expected in package["files"].items():
            member = archive.extractfile(f"package/dist/{file}")
            assert member is not None
            assert digest(member.read()) == expected
