"""Every command in the documentation is accepted by its program: lines of blocks, and names and flags in prose."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from ddp_cli.__main__ import COMMANDS
from ddp_cli.commands import build_parser
from ddp_sdk.errors import UserError
from ddp_trainer.cli import build_parser as build_trainer_parser
from tests.bench.trainer.cli import build_parser as build_bench_parser
from tests.support import ROOT
from tests.support.chart import render

from .test_docs import commands, fenced, outside_of_fences, pages_with

# Text in a block that users do not type: formulas, a program's example output.
NOT_TYPED = {
    "docs/effective-time.md": r"share = ",
    "docs/metrics.md": r"work\(rank\) =|/ rate\(|straggler ratio =|goodput =|(steps|samples|tokens) per second +=",
    "docs/pod-contract.md": r"kubectl get configmap .*base64",
}
KUBECTL = {
    "apply", "config", "create", "cp", "delete", "describe", "exec", "explain", "get", "label", "logs", "patch",
    "rollout", "run", "scale",
}  # fmt: skip
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def block_lines(text: str) -> list[str]:
    """Return the lines of all blocks without another language, without comments and prompts."""
    text = re.sub(r" *\\\n *", " ", text)  # a continued line
    lines = re.findall(r"^    (?:\s*)(\S.*)$", outside_of_fences(text), flags=re.MULTILINE)
    for language in ("sh", "bash", "console"):
        lines += [line for block in fenced(text, language) for line in block.splitlines()]
    return [line.strip().removeprefix("$ ") for line in lines if line.strip() and not line.strip().startswith("#")]


def check_ddp(words: list[str]) -> None:
    ours = words[: words.index("--")] if "--" in words else words
    build_parser(COMMANDS, ours[0])[0].parse_args([word for word in ours if word != ">"])


def check_make(words: list[str]) -> None:
    assert {word for word in words if "=" not in word} <= TARGETS, words


def check_kubectl(words: list[str]) -> None:
    assert words[0] in KUBECTL or words[2] in KUBECTL, f"kubectl {words[0]}: not known here"


def check_helm(words: list[str]) -> None:
    """Render the chart with the values of the line."""
    assert words[0] in ("install", "upgrade", "test", "uninstall")
    if words[0] not in ("install", "upgrade"):
        return
    name, chart = [word for word in words[1:] if not word.startswith("-")][:2]
    assert (ROOT / chart / "Chart.yaml").is_file(), chart
    values: dict[str, Any] = {}
    for flag, value in itertools.pairwise(words):
        if flag in ("-f", "--values"):
            values |= yaml.safe_load((ROOT / value).read_text())
        if flag == "--set":
            path, _, text = value.partition("=")
            *above, last = path.split(".")
            place = values
            for part in above:
                place = place.setdefault(part, {})
            place[last] = text[1:-1].split(",") if text.startswith("{") else yaml.safe_load(text)
    assert render(values, name=name)


def check_torchrun(words: list[str]) -> None:
    if "ddp_trainer" in words:
        build_trainer_parser().parse_args(words[words.index("ddp_trainer") + 1 :])
    else:
        assert words == ["--nproc-per-node=2", "train.py"], words


def check_python(words: list[str]) -> None:
    assert words[0] == "-m", words
    if words[1] == "tests.bench.trainer":
        build_bench_parser().parse_args(words[2:])
    else:
        assert importlib.util.find_spec(words[1]) is not None, words[1]


def check_pip(words: list[str]) -> None:
    """Accept an installation of a clone with one of its extras, and of a recipe's packages."""
    if words == ["install", "-r", "requirements.txt"]:
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    match = re.fullmatch(r"/path/to/clone\[(\w+)\]", words[1])
    assert words[0] == "install"
    assert match is not None
    assert match[1] in project["optional-dependencies"]


CHECKS: dict[str, Callable[[list[str]], Any]] = {
    "ddp": check_ddp, "make": check_make, "kubectl": check_kubectl, "helm": check_helm, "torchrun": check_torchrun,
    "python": check_python, "python3": check_python, "pip": check_pip,
}  # fmt: skip
UNCHECKED = {"cosign", "docker", "gh", "sha256sum", "source", ".venv/bin/pre-commit"}


def check(line: str) -> None:
    """Fail if the line's program would refuse it."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z]+=\S*", words[0]):
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    if words[0] not in UNCHECKED:
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


@pytest.mark.parametrize(
    "line",
    [
        "ddp run job.yaml --nodez 2", "ddp trian", "make everything", "kubectl aply -f x",
        "helm install ddp-operator charts/ --set replica=2", "helm install ddp-operator chart/",
        "helm install x charts/ --set watch.namespaces={a}", "torchrun -m ddp_trainer --presett x",
        "python -m tests.bench.trainer --systems", "python -m tests.bench.nothing", "curl https://example.com | sh",
    ],
)  # fmt: skip
def test_line_that_would_fail_is_found(line: str) -> None:
    with pytest.raises((AssertionError, SystemExit, UserError, helm_python.HelmValuesError)):
        check(line)


def find_unknown_names(text: str) -> set[str]:
    """Return the commands, targets, modules and files in a page's commands that do not exist."""
    unknown = set()
    subcommands = {command.name for command in COMMANDS}
    for line in commands(text):
        program, *words = line.split()
        program = program.rpartition("/")[2]
        if program == "ddp" and words and re.fullmatch(r"[a-z]+", words[0]) and words[0] not in subcommands:
            unknown.add(line)
        if program == "make" and words and re.fullmatch(r"[a-z0-9-]+", words[0]) and words[0] not in TARGETS:
            unknown.add(line)
        if program in ("python", "python3") and words[:1] == ["-m"] and words[1].startswith(("ddp_", "tests")):
            unknown |= {words[1]} if importlib.util.find_spec(words[1]) is None else set()
        if program in ("ddp", "kubectl", "python", "python3", "pytest"):
            files = re.findall(r"(?:^|\s)((?:deploy|docs|tests|charts|trainer|operator)/[\w./-]+)", line)
            unknown |= {name for name in files if not (ROOT / name).exists()}
    return unknown


@pages_with(commands)
def test_names_in_commands_exist(path: Path) -> None:
    assert find_unknown_names(path.read_text(encoding="utf-8")) == set()


def test_names_that_do_not_exist_are_found() -> None:
    text = "Run `make a`, or `ddp trian`:\n\n    python -m tests.nothing\n\n```sh\n$ ddp run deploy/a.yaml\n```\n"
    assert find_unknown_names(text) == {"make a", "ddp trian", "tests.nothing", "deploy/a.yaml"}


# Flags of other programs in the prose.
FOREIGN = {
    "buildah": {"--build-arg"},
    "kube-apiserver": {"--feature-gates", "--runtime-config"},
    "kubectl": {"--cascade", "--force", "--manifest-url", "--replicas", "--server-side", "--type"},
    "kube-controller-manager": {"--kube-api-burst", "--kube-api-qps"},
    "pip": {"--find-links", "--only-binary", "--platform"},
    "tensorboard": {"--logdir"},
    "torchrun": {
        "--log-dir", "--logs-specs", "--nnodes", "--no-python", "--node_rank", "--nproc_per_node", "--numa-binding",
        "--rdzv_", "--redirects", "--tee",
    },
    "the trainer of former releases": {"--accumulate", "--eval-only", "--init-from", "--validate-every-steps"},
    "scripts of other projects": {
        "--dist-backend", "--multiprocessing-distributed", "--no-accel",
        "--bf16", "--checkpointing_steps", "--deepspeed_config", "--fsdp", "--init_from", "--max_iters", "--max_steps",
        "--num_train_epochs",
        "--resume_from_checkpoint", "--save_steps", "--trainer", "--use_cpu", "--wandb_log",
    },
}  # fmt: skip


def own_flags() -> set[str]:
    """Return every flag of this project's programs; those of drills, benchmarks and pytest from their sources."""
    parsers: list[Any] = [
        build_parser(COMMANDS, *(command.name for command in COMMANDS))[0],
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
    spans = re.findall(r"`([^`]+)`", outside_of_fences(text))
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
    assert asked <= TARGETS
    for script in (word for text in called for word in re.findall(r"\bbash (\S+)", text)):
        assert (ROOT / script).is_file()
    assert all(job["timeout-minutes"] <= 360 for job in jobs)
