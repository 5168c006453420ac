"""The kubectl plugin for krew: the wrapper, and the manifest that a release build writes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_operator import __version__
from tests.support import ROOT

from .test_release import load_release

REPOSITORY = "https://github.com/team/ddp-operator"
WRAPPER = ROOT / "deploy/krew/kubectl-ddp"


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    """The manifest of a release build in a temporary folder."""
    load_release().Build(ROOT, tmp_path, "ghcr.io/team", 1_700_000_000, "0" * 40, REPOSITORY).krew()
    return yaml.safe_load((tmp_path / "ddp.yaml").read_text(encoding="utf-8"))


def run_wrapper(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the wrapper with a PATH."""
    return subprocess.run(
        ["/bin/sh", WRAPPER, *arguments], env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )


def test_manifest_has_the_fields_that_krew_requires(manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert manifest["kind"] == "Plugin"
    assert manifest["metadata"] == {"name": "ddp"}  # as the file's name
    spec = manifest["spec"]
    assert spec["version"] == f"v{__version__}"
    assert spec["homepage"] == REPOSITORY
    # krew-index refuses longer ones.
    assert len(spec["shortDescription"]) <= 50
    assert max(map(len, spec["description"].splitlines())) <= 80
    assert "@" not in yaml.safe_dump(manifest)


def test_manifest_names_the_archive_and_its_content(manifest: dict[str, Any], tmp_path: Path) -> None:
    (platform,) = manifest["spec"]["platforms"]
    archive = tmp_path / f"kubectl-ddp-{__version__}.tar.gz"
    assert platform["uri"] == f"{REPOSITORY}/releases/download/v{__version__}/{archive.name}"
    assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    (expression,) = platform["selector"]["matchExpressions"]
    assert expression == {"key": "os", "operator": "In", "values": ["darwin", "linux"]}
    with tarfile.open(archive) as packed:
        modes = {member.name: member.mode for member in packed}
    assert {entry["from"] for entry in platform["files"]} == set(modes)
    assert modes[platform["bin"]] & 0o111


def test_archive_is_the_same_in_two_builds(tmp_path: Path) -> None:
    digests = set()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        load_release().Build(ROOT, tmp_path / name, "r", 1_700_000_000, "0" * 40).krew()
        (archive,) = (tmp_path / name).iterdir()  # without a repository there is no manifest
        digests.add(hashlib.sha256(archive.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_wrapper_runs_the_installed_command_with_its_arguments_and_exit_code(tmp_path: Path) -> None:
    command = tmp_path / "ddp"
    command.write_text('#!/bin/sh\nprintf "<%s>" "$@"\nexit 3\n')
    command.chmod(0o755)
    ran = run_wrapper(f"{tmp_path}:{os.environ['PATH']}", "why", "two words")
    assert (ran.returncode, ran.stdout) == (3, "<why><two words>")


def test_wrapper_without_the_command_states_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "cat").symlink_to("/bin/cat")
    ran = run_wrapper(str(tmp_path), "list")
    assert ran.returncode == 127
    assert ran.stdout == ""
    assert re.search(r"ddp is not installed.*pipx install '/path/to/clone\[cli\]'", ran.stderr, re.DOTALL)
