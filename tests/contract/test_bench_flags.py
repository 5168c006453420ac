"""`ddp bench` declares the benchmark's flags without importing it: here the two are held against each other."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from ddp_operator.cli import bench, main
from ddp_trainer.benchmark.cli import build_parser


def test_both_have_the_same_flags() -> None:
    theirs = {
        action.option_strings[0]: action.nargs == 0
        for action in build_parser()._actions
        if action.option_strings[0] != "-h"
    }
    assert {name: metavar is None for name, metavar, _ in bench.FLAGS} == theirs


def test_flags_are_passed_on_and_the_exit_code_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(command: list[str], **named: Any) -> subprocess.CompletedProcess[bytes]:
        started.append(command)
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["bench", "--quick", "--systems", "cifar10-resnet50,cifar10-resnet18", "--data-dir", "x"]) == 2
    flags = ["--quick", "--systems", "cifar10-resnet50,cifar10-resnet18", "--data-dir", "x"]
    assert started == [[sys.executable, "-m", "ddp_trainer.benchmark", *flags]]


def test_without_the_trainer_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench"]) == 2
    assert "pip install 'ddp-operator[trainer]'" in capsys.readouterr().err
