"""Everything that builds, tests or publishes this project is pinned by content: a commit, a digest, a hash."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def parse_lock(path: Path) -> dict[str, list[str]]:
    """Return the hashes of each requirement of a lock file, by name."""
    joined = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return {line.split("==")[0]: re.findall(r"--hash=sha256:([0-9a-f]{64})", line) for line in lines}


def read_steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_pins_every_action_by_commit(path: Path) -> None:
    uses = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert uses
    assert [line for line in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*", line)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_verifies_downloads(path: Path) -> None:
    scripts = [step["run"] for step in read_steps(path) if "run" in step]
    for script in scripts:
        if re.search(r"\b(curl|wget)\b", script):
            assert re.search(r"\b(cosign verify-blob|sha256sum --check)\b", script), script
        if re.search(r"\bpipx? (install|run)\b", script):
            assert "--require-hashes" in script, script
        assert not re.search(r"\bgo run \S+@(?!v)\S+", script), script


def test_constraints_have_hashes() -> None:
    hashes = parse_lock(ROOT / ".ci/constraints.txt")
    assert len(hashes) > 100
    assert [name for name, result in hashes.items() if not result] == []


def test_only_pytorch_is_installed_by_version_alone() -> None:
    assert set(parse_lock(ROOT / ".ci/pytorch.txt")) == {"torch", "torchvision"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = [line for line in makefile.split("install: $(STAMP)")[1].split("##### ")[0].splitlines() if "pip" in line]
    installs = [line for line in lines if re.search(r"\binstall\b -", line) and "--require-hashes" not in line]
    assert ["pytorch.txt" in line or "--no-index" in line for line in installs] == [True, True]
    assert all(parse_lock(ROOT / ".ci/pip.txt").values())


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_image_installs_its_dependencies_in_versions_of_constraints(image: str) -> None:
    hashes = parse_lock(ROOT / "images" / image / "requirements.txt")
    constraints = parse_lock(ROOT / ".ci/constraints.txt")
    assert all(hashes.values())
    assert {name: constraints.get(name) for name in hashes} == hashes
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expected = [*project["dependencies"], *project["optional-dependencies"][image]]
    names = {re.split(r"[^\w-]", requirement)[0].lower().replace("_", "-") for requirement in expected}
    assert names - {"torch", "torchvision", "cel-expr-python", "jinja2", "rich"} <= set(hashes)


def test_build_backend_is_locked() -> None:
    hashes = parse_lock(ROOT / "images/backend.txt")
    assert all(hashes.values())
    assert "hatchling" in hashes


def test_release_tools_are_locked_in_their_versions() -> None:
    lock = ROOT / ".ci/release-tools.txt"
    hashes = parse_lock(lock)
    assert all(hashes.values())
    expected = (ROOT / ".ci/release-tools.in").read_text(encoding="utf-8").split()
    assert set(expected) <= {line.split()[0] for line in lock.read_text(encoding="utf-8").splitlines()}


def test_build_backend_is_pinned() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", requirement) for requirement in build["requires"])


def find_locks() -> set[str]:
    """Return the paths of all files of this repository that pin packages by hash, and PyTorch's."""
    paths = [*(ROOT / ".ci").glob("**/*.txt"), *(ROOT / "images").glob("**/*.txt")]
    return {str(path.relative_to(ROOT)) for path in paths}


def test_nightly_scan_reads_every_lock() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))["jobs"]
    arguments = jobs["vulnerabilities"]["steps"][-1]["with"]["scan-args"]
    assert set(re.findall(r"--lockfile=requirements\.txt:(\S+)", arguments)) == find_locks()


def test_renovate_updates_every_lock_every_base_image_and_every_action() -> None:
    config = json.loads((ROOT / ".github/renovate.json").read_text(encoding="utf-8"))
    assert config["enabledManagers"] == ["dockerfile", "github-actions", "pip_requirements"]
    patterns = [pattern.strip("/") for pattern in config["pip_requirements"]["managerFilePatterns"]]
    locks = find_locks()
    assert {path for path in locks if any(re.search(pattern, path) for pattern in patterns)} == locks


def test_renovate_groups_the_locks_because_they_name_the_same_versions() -> None:
    rules = json.loads((ROOT / ".github/renovate.json").read_text(encoding="utf-8"))["packageRules"]
    (group, torch) = (rule for rule in rules if rule["matchManagers"] == ["pip_requirements"])
    assert group["groupName"] == "Python packages"
    assert (torch["matchPackageNames"], torch["enabled"]) == (["torch", "torchvision"], False)
