"""The instructions of the Dockerfiles: rules for small, reproducible and safe images."""

from __future__ import annotations

import fnmatch
import io
import json
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml

from ddp_operator import __version__
from ddp_operator.manager.settings import Settings
from ddp_operator.manifests.children import load_launcher
from tests.support import ROOT

IMAGES = ("operator", "trainer")
both = pytest.mark.parametrize("name", IMAGES)

Instruction = tuple[str, str]


def parse(text: str) -> list[Instruction]:
    """Return instruction and arguments, continued lines joined, comments dropped."""
    joined = re.sub(r"\\\n(\s*#.*\n)*", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    lines = [" ".join(line.split()) for line in joined.splitlines() if line.strip()]
    return [(line.split(" ", 1)[0].upper(), line.split(" ", 1)[1]) for line in lines]


def read(name: str) -> list[Instruction]:
    return parse((ROOT / "images" / name / "Dockerfile").read_text(encoding="utf-8"))


def values(instructions: list[Instruction], kind: str) -> list[str]:
    return [arguments for result, arguments in instructions if result == kind]


def last_stage(instructions: list[Instruction]) -> list[Instruction]:
    start = max(index for index, (kind, _) in enumerate(instructions) if kind == "FROM")
    return instructions[start:]


def find_faults(instructions: list[Instruction]) -> list[str]:
    """Return the violations of the rules for this project's Dockerfiles."""
    faults = [*find_unpinned_bases(instructions), *find_root_user(instructions)]
    if values(instructions, "ADD"):
        faults.append("ADD: use COPY")
    for command in values(instructions, "RUN"):
        faults += find_unpinned_installs(command)
    for command in values(last_stage(instructions), "ENTRYPOINT") + values(last_stage(instructions), "CMD"):
        if not command.startswith("["):
            faults.append(f"{command}: in the form of a list, so that signals arrive")
    for copied in values(instructions, "COPY"):
        if re.match(r"(\.|/) ", copied):
            faults.append(f"COPY {copied}: name what is copied")
    return faults


def find_unpinned_bases(instructions: list[Instruction]) -> list[str]:
    faults = []
    defaults = dict(value.split("=", 1) for value in values(instructions, "ARG") if "=" in value)
    for base in values(instructions, "FROM"):
        image = re.sub(r"^--platform=\S+ ", "", base).split()[0].replace("${BASE}", defaults.get("BASE", ""))
        if not re.search(r":\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}$", image):
            faults.append(f"FROM {image}: pin the version to the patch level, and the digest")
    return faults


def find_root_user(instructions: list[Instruction]) -> list[str]:
    users = values(last_stage(instructions), "USER")
    if users and re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        return []
    return ["USER: must be a number above 0 with its group, so that runAsNonRoot can be checked"]


def find_unpinned_installs(command: str) -> list[str]:
    faults = []
    for install in re.findall(r"(?:pip [^&]*?install|install\.py) [^&]*", command):
        if not re.search(r"--no-deps|--require-hashes|-r \.ci/pytorch\.txt -c \S+", install):
            faults.append(f"RUN {install}: pin the versions with hashes")
    if re.search(r"\b(apt-get|curl|wget|sudo)\b", command):
        faults.append(f"RUN {command}: installs an unpinned package")
    return faults


@both
def test_dockerfile_of_this_project_has_no_fault(name: str) -> None:
    assert find_faults(read(name)) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("FROM python\nUSER 1:1", "pin the version"),
        ("FROM python:3.13\nUSER 1:1", "pin the version"),
        ("FROM python:3.13.7-slim\nUSER 1:1", "and the digest"),
        ("ARG BASE=python:latest\nFROM ${BASE}\nUSER 1:1", "pin the version"),
        ("FROM p:1.2.3", "USER"),
        ("FROM p:1.2.3\nUSER root", "USER"),
        ("FROM p:1.2.3\nUSER 0:0", "USER"),
        ("FROM p:1.2.3\nUSER 1:1\nFROM p:1.2.3", "USER"),
        ("FROM p:1.2.3\nADD x y\nUSER 1:1", "ADD"),
        ("FROM p:1.2.3\nCOPY . .\nUSER 1:1", "name what is copied"),
        ("FROM p:1.2.3\nRUN true \\\n  && pip install torch\nUSER 1:1", "pin the versions"),
        ("FROM p:1.2.3\nRUN python3 images/install.py arm64 torch\nUSER 1:1", "pin the versions"),
        ("FROM --platform=${BUILDPLATFORM} python:3.13 AS build\nUSER 1:1", "pin the version"),
        ("FROM p:1.2.3\nRUN apt-get update\nUSER 1:1", "unpinned"),
        ("FROM p:1.2.3\nUSER 1:1\nCMD python", "form of a list"),
    ],
)
def test_faulty_dockerfile_is_refused(text: str, fault: str) -> None:
    assert any(fault in message for message in find_faults(parse(text)))


@both
def test_sources_exist_and_reach_builder(name: str) -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    for rule in kept:
        assert (ROOT / rule).exists(), rule
    for copied in values(read(name), "COPY"):
        if copied.startswith("--from="):
            continue
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists(), source
            reached = [
                rule for rule in kept if rule == source or rule.startswith(f"{source}/") or source.startswith(rule)
            ]
            assert reached, f"{source} is ignored"
    for secret in (".git/config", ".venv/bin/pip", "ddp-runs/x", ".env", "tests/conftest.py"):
        assert not any(fnmatch.fnmatch(secret, rule) or secret.startswith(f"{rule}/") for rule in kept)


@both
def test_labels_contain_version(name: str) -> None:
    stage = last_stage(read(name))
    assert f"VERSION={__version__}" in values(stage, "ARG")
    labels = " ".join(values(stage, "LABEL"))
    keys = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", labels))
    assert keys == {"title", "description", "licenses", "version", "revision"}


def test_operator_command_equals_chart() -> None:
    stage = last_stage(read("operator"))
    (deployment,) = (
        result
        for result in yaml.safe_load_all((ROOT / "deploy/manifests/operator.yaml").read_text())
        if result["kind"] == "Deployment"
    )
    pod = deployment["spec"]["template"]["spec"]
    assert json.loads(values(stage, "ENTRYPOINT")[0]) == pod["containers"][0]["command"]
    assert values(stage, "EXPOSE") == [str(Settings().health_port)]
    user = values(stage, "USER")[0]
    security = pod["securityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"


def test_operator_contains_what_its_launcher_delivers() -> None:
    copied = [word for arguments in values(read("operator"), "COPY") for word in arguments.split()[:-1]]
    with zipfile.ZipFile(io.BytesIO(load_launcher().archive)) as archive:
        delivered = [f"trainer/{name}" for name in archive.namelist() if name.startswith(("ddp_sdk/", "ddp_trainer/"))]
    assert [name for name in delivered if not any(name == word or name.startswith(f"{word}/") for word in copied)] == []


COMMANDS = ["cel-expr-python>=0.1.3,<1", "jinja2>=3.1,<4", "rich>=13.7"]
"""What only commands import."""


def test_operator_requires_no_torch() -> None:
    printed = requirements("operator")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["operator"]]
    assert [line for line in required if line not in printed] == COMMANDS
    assert not [line for line in printed if re.match(r"torch|numpy|kubernetes|matplotlib", line)]


def requirements(extra: str) -> list[str]:
    """Return what the image's build installs for an extra."""
    command = [sys.executable, ROOT / "images" / "requirements.py", extra]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
