"""Every line of every command block in the documentation is parsed as the program that it calls would parse it."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from ddp_cli.commands import COMMANDS, build_parser
from ddp_trainer.cli import build_parser as build_trainer_parser
from ddp_trainer.errors import UserError
from tests.bench.trainer.cli import build_parser as build_bench_parser
from tests.support import ROOT
from tests.support.chart import render

from .test_dockerfiles import parse as parse_dockerfile
from .test_docs import fenced, pages_with, targets

# Text in a block that users do not type: formulas, messages, a program's output.
NOT_TYPED = {
    "docs/benchmark.md": r"ring all-reduce|parameter server",
    "docs/metrics.md": r"work\(rank\) =|/ rate\(|straggler ratio =|goodput =|(steps|samples|tokens) per second +=",
    "docs/pod-contract.md": r"kubectl get configmap .*base64",
}
KUBECTL: dict[str, set[str]] = {
    "apply": {"-f", "-k", "--server-side", "-n"},
    "get": {"-n", "-o", "-w", "-l", "-A"},
    "describe": {"-n"},
    "logs": {"-n", "-l", "-f", "--tail", "--prefix", "--previous", "--all-pods", "-c"},
    "scale": {"-n", "--replicas"},
    "delete": {"-n", "-f", "-l"},
    "explain": {"--recursive"},
    "rollout": {"-n", "--timeout"},
    "run": {"-n", "--rm", "-it", "--image"},
    "exec": {"-n", "-it", "-c"},
    "label": {"-n", "--overwrite"},
}
HELM = {"install": "--install", "upgrade": "--install", "test": "", "uninstall": ""}
IS_VALUE = {
    "-n",
    "-f",
    "--values",
    "-k",
    "-l",
    "-o",
    "-c",
    "--namespace",
    "--set",
    "--timeout",
    "--tail",
    "--replicas",
    "--image",
}

Check = Callable[[list[str]], Any]


def block_lines(text: str) -> list[str]:
    """Return the lines of all blocks without another language, without comments and prompts."""
    text = re.sub(r" *\\\n *", " ", text)  # a continued line
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^    (?:\s*)(\S.*)$", outside, flags=re.MULTILINE)
    for language in ("sh", "bash", "console"):
        lines += [line for block in fenced(text, language) for line in block.splitlines()]
    return [line.strip().removeprefix("$ ") for line in lines if line.strip() and not line.strip().startswith("#")]


def languages_in(text: str) -> set[str]:
    return set(re.findall(r"^```(\w*)", text, flags=re.MULTILINE)) - {""}


def flags_of(words: list[str]) -> tuple[list[str], set[str]]:
    """Return the arguments that are no flags, and the flags without their values."""
    plain = []
    flags = set()
    rest = iter(words[: words.index("--")] if "--" in words else words)
    for word in rest:
        name, _, value = word.partition("=")
        if not word.startswith("-"):
            plain.append(word)
            continue
        flags.add(name)
        if name in IS_VALUE and not value:
            next(rest)
    return plain, flags


def check_ddp(words: list[str]) -> None:
    ours = words[: words.index("--")] if "--" in words else words
    build_parser(ours[0])[0].parse_args([word for word in ours if word != ">" and not word.endswith(".yaml>")])


def check_make(words: list[str]) -> None:
    assert {word for word in words if "=" not in word} <= targets(), words


def check_kubectl(words: list[str]) -> None:
    plain, flags = flags_of(words)
    assert plain[0] in KUBECTL, f"kubectl {plain[0]}: not known here"
    assert flags <= KUBECTL[plain[0]], flags - KUBECTL[plain[0]]
    kinds = {"ddp", "ddptrainingjobs", "pods", "lease", "deployment", "nodes", "events", "jobs", "job", "pod", "crd"}
    if plain[0] in ("get", "describe", "scale", "delete") and len(plain) > 1:
        assert plain[1].partition("/")[0] in kinds, plain[1]


def check_helm(words: list[str]) -> None:
    """Render the chart with the values of the line."""
    plain, flags = flags_of(words)
    assert plain[0] in HELM
    allowed = {"-n", "--namespace", "--create-namespace", "--set", "-f", "--values", "--wait", "--timeout"}
    allowed |= {HELM[plain[0]]}
    assert flags <= allowed, flags - allowed
    if plain[0] not in ("install", "upgrade"):
        return
    assert (ROOT / plain[2] / "Chart.yaml").is_file(), plain[2]
    values: dict[str, Any] = {}
    for flag, value in itertools.pairwise(words):
        if flag in ("-f", "--values"):
            values |= yaml.safe_load((ROOT / value).read_text())
        if flag == "--set":
            path, _, text = value.partition("=")
            *above, last = path.split(".")
            place = values
            for name in above:
                place = place.setdefault(name, {})
            place[last] = text[1:-1].split(",") if text.startswith("{") else yaml.safe_load(text)
    assert render(values, name=plain[1])


def check_torchrun(words: list[str]) -> None:
    if "ddp_trainer" in words:
        build_trainer_parser().parse_args(words[words.index("ddp_trainer") + 1 :])
    else:
        assert words == ["--nproc-per-node=2", "train.py"], words


def check_python(words: list[str]) -> None:
    assert words[0] == "-m", words
    if words[1] == "tests.bench.trainer":
        build_bench_parser().parse_args(words[2:])
    elif words[1] != "pytest":
        # test_docs.py checks that the module exists; it has no arguments.
        assert words[1] in ("ddp_operator", "tests.bench.trainer.launches", "tests.bench.trainer.overhead"), words
        assert words[2:] == []


def check_docker(words: list[str]) -> None:
    plain, flags = flags_of([word for word in words if word != "."])
    assert plain[0] in ("build", "push")
    assert flags <= {"-t", "-f", "--build-arg"}


def check_pip(words: list[str]) -> None:
    """Accept an installation of a clone with one of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    match = re.fullmatch(r"/path/to/clone\[(\w+)\]", words[1])
    assert words[0] == "install"
    assert match is not None
    assert match[1] in project["optional-dependencies"]


CHECKS: dict[str, Check] = {
    "ddp": check_ddp, "make": check_make, "kubectl": check_kubectl, "helm": check_helm, "torchrun": check_torchrun,
    "python": check_python, "python3": check_python, "docker": check_docker,
    "cosign": lambda words: words[0] == "verify", "gh": lambda words: words[:2] == ["attestation", "verify"],
    "pip": check_pip, "sha256sum": lambda words: words[0] == "--check",
    ".venv/bin/pre-commit": lambda words: words == ["install"], "source": lambda words: words,
}  # fmt: skip


def check(line: str) -> None:
    """Fail if the line's program would refuse it."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z]+=\S*", words[0]):
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    assert words[0] in CHECKS, f"{line}: no check knows {words[0]}"
    CHECKS[words[0]](words[1:])


@pages_with(block_lines)
def test_every_line_of_block_can_be_typed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(path.relative_to(ROOT))
    text = path.read_text(encoding="utf-8")
    if name == "docs/cli.md":
        text = re.sub(r"^    ddp .*\[.*$", "", text, flags=re.MULTILINE)  # usage lines, generated from the parsers
    if name == "docs/metrics.md":  # its example is run by the exporter's test
        text = re.sub(r"^    import torch\n(?:(?:    .*)?\n)+", "", text, flags=re.MULTILINE)
    not_typed = re.compile(NOT_TYPED.get(name, "(?!)"))
    for line in block_lines(text):
        if not_typed.match(line):
            continue
        try:
            check(line)
        except SystemExit:
            raise AssertionError(f"{line}: {capsys.readouterr().err}") from None


@pages_with(languages_in)
def test_blocks_of_other_languages_are_read_by_test(path: Path) -> None:
    """test_docs.py checks YAML and Python; `text` is a program's output."""
    text = path.read_text(encoding="utf-8")
    assert languages_in(text) <= {"yaml", "python", "sh", "bash", "console", "json", "mermaid", "text", "dockerfile"}
    for block in fenced(text, "json"):
        json.loads(block)
    for block in fenced(text, "dockerfile"):
        instructions = parse_dockerfile(block)
        assert instructions[0][0] == "FROM"
        assert {kind for kind, _ in instructions} <= {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ARG", "LABEL"}


@pytest.mark.parametrize(
    "line",
    [
        "ddp run job.yaml --nodez 2", "ddp trian", "make everything", "kubectl aply -f x", "kubectl get ddp --sorted",
        "kubectl get dpd", "helm install ddp-operator charts/ --set replica=2", "helm install ddp-operator chart/",
        "helm install x charts/ --set watch.namespaces={a}", "torchrun -m ddp_trainer --presett x",
        "python -m tests.bench.trainer --systems", "curl https://example.com | sh",
    ],
)  # fmt: skip
def test_line_that_would_fail_is_found(line: str) -> None:
    with pytest.raises((AssertionError, SystemExit, UserError, helm_python.HelmValuesError)):
        check(line)


# Flags of other programs in the prose.
FOREIGN = {
    "buildah": {"--build-arg"},
    "kube-apiserver": {"--feature-gates", "--runtime-config"},
    "kubectl": {"--cascade", "--force", "--manifest-url", "--replicas", "--server-side", "--type"},
    "kube-controller-manager": {"--kube-api-burst", "--kube-api-qps"},
    "pip": {"--only-binary", "--platform"},
    "tensorboard": {"--logdir"},
    "torchrun": {
        "--log-dir", "--logs-specs", "--nnodes", "--no-python", "--node_rank", "--nproc_per_node", "--numa-binding",
        "--rdzv_", "--redirects", "--tee",
    },
    "scripts of other projects": {
        "--bf16", "--deepspeed_config", "--fsdp", "--max_iters", "--max_steps", "--num_train_epochs", "--trainer",
    },
}  # fmt: skip


def own_flags() -> set[str]:
    """Return every flag of this project's programs; those of drills, benchmarks and pytest from their sources."""
    parsers: list[Any] = [
        build_parser(*(name for name, *_ in COMMANDS))[0],
        build_trainer_parser(),
        build_bench_parser(),
    ]
    results = set()
    for parser in parsers:
        for action in parser._actions:
            results |= set(action.option_strings)
            parsers += (action.choices or {}).values() if isinstance(action, argparse._SubParsersAction) else ()
    sources = [
        *ROOT.glob("tests/drills/*.py"),
        *ROOT.glob("tests/bench/*.py"),
        *ROOT.glob(".ci/*.py"),
        ROOT / "tests/conftest.py",
    ]
    return results.union(
        *(re.findall(r'(?:add_argument|addoption)\(\s*"(--[\w-]+)"', path.read_text()) for path in sources)
    )


def flags_in_prose(text: str) -> set[str]:
    """Return the flags in backticks outside of fenced blocks."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", outside)
    return {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}


@pages_with(flags_in_prose)
def test_every_flag_in_prose_exists(path: Path) -> None:
    unknown = flags_in_prose(path.read_text(encoding="utf-8")) - own_flags() - set().union(*FOREIGN.values())
    assert unknown == set(), "no program has these: is there a misspelling, or is FOREIGN to be completed?"


def test_flag_that_no_program_has_is_found() -> None:
    text = "Say `--comm-hook bf16` or `ddp run --nodes 2`.\n\n```sh\ntool --of-another\n```\n"
    assert flags_in_prose(text) - own_flags() == {"--comm-hook"}


WRITING_JOBS = {
    "docs": {"publish"},  # the branch gh-pages
    "release": {"publish", "pypi"},
    "scorecard": {"analysis"},  # findings of code scanning, and an identity to publish the score
}


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_call_existing_targets_and_only_release_writes(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    jobs = workflow["jobs"].values()
    assert workflow["permissions"] == ({} if all("permissions" in job for job in jobs) else {"contents": "read"})
    writing = {name for name, job in workflow["jobs"].items() if "write" in job.get("permissions", {}).values()}
    assert writing == WRITING_JOBS.get(path.stem, set())
    called = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    asked = {name for text in called for name in re.findall(r"\bmake ([a-z0-9-]+)", text)}
    assert asked <= targets()
    for script in (word for text in called for word in re.findall(r"\bbash (\S+)", text)):
        assert (ROOT / script).is_file()
    assert all(job["timeout-minutes"] <= 360 for job in jobs)
