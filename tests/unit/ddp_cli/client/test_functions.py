"""Functions as programs: how a rank imports one, its permitted arguments, and functions that cannot be sent."""

from __future__ import annotations

import functools
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ddp_cli import ClientError
from ddp_cli.client.functions import check_arguments, find_function

SOURCE = """
import pathlib
import sys

import helpers.things


def train(lr, *, epochs=1, betas=()):
    pathlib.Path("called").write_text(repr((helpers.things.NAME, lr, epochs, betas, sys.argv)))


def fail():
    raise KeyError("lr")


class Recipe:
    @staticmethod
    def train():
        print("a recipe")


def outer():
    def inner(): ...
    return inner


other = lambda: None
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module, which imports another, in the subfolder src that is on the path."""
    source = tmp_path / "project" / "src"
    (source / "helpers").mkdir(parents=True)
    (source / "recipes.py").write_text(SOURCE)
    (source / "helpers" / "__init__.py").write_text("def train(): ...\n")
    (source / "helpers" / "things.py").write_text("NAME = 'a thing'\ndef train(): ...\n")
    monkeypatch.syspath_prepend(source)
    before = set(sys.modules)
    yield source.parent
    for name in set(sys.modules) - before:
        del sys.modules[name]


def load(name: str = "recipes") -> ModuleType:
    return importlib.import_module(name)


def call(command: list[str], workdir: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a pod would: in a copy of the folder, without this process's environment."""
    words = [word.replace("$$(", "$(") for word in command]
    return subprocess.run([sys.executable, "-I", *words[1:]], cwd=workdir, capture_output=True, text=True, timeout=300)


def test_rank_imports_function_with_its_module_folder_and_calls_it(project: Path) -> None:
    function = find_function(load().train)
    assert (function.module, function.name, function.root) == ("recipes", "train", project / "src")
    args = {"lr": 0.1, "betas": (0.9, "$(HOME)")}
    check_arguments(function, args)
    done = call(function.build_command(args, project), project)
    assert (done.returncode, done.stderr) == (0, "")
    assert (project / "called").read_text() == "('a thing', 0.1, 1, [0.9, '$(HOME)'], ['-c'])"


@pytest.mark.parametrize(
    ("pick", "words"),
    [
        (lambda module: module.other, "<lambda> is a lambda"),
        (lambda module: module.outer(), "is inside another function"),
        (lambda module: functools.partial(module.train, 1), "is not a function of a module"),
        (lambda module: module.Recipe().train.__call__, "is not a function of a module"),
        (lambda module: json.dumps, None),
        (lambda module: pytest.approx, "is in an installed package"),
    ],
)  # fmt: skip
def test_function_that_pods_cannot_import_is_refused(project: Path, pick: Any, words: str | None) -> None:
    if words is None:
        find_function(pick(load()))  # every image has the standard library's modules
        return
    with pytest.raises(ClientError, match=words):
        find_function(pick(load()))


def test_function_of_notebook_must_be_written_to_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load()
    monkeypatch.setattr(module.train, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(ClientError, match=r"%%writefile training\.py.*from training import train"):
        find_function(module.train)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"lr": Path("x")}, r"args\['lr'\]: a PosixPath is not plain data"),
        ({"lr": [1, {"a": {2}}]}, r"args\['lr'\]\[1\]\['a'\]: a set is not plain data"),
        ({"lr": {1: 2}}, r"args\['lr'\]: key 1 is not a string"),
        ({"lr": 1, "epoch": 2}, r"recipes\.train\(\): got an unexpected keyword argument 'epoch'"),
        ({}, r"recipes\.train\(\): missing a required argument: 'lr'"),
    ],
)
def test_invalid_arguments_are_named(project: Path, args: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        check_arguments(find_function(load().train), args)


def test_file_is_read_instead_of_imported_module(project: Path) -> None:
    function = find_function(load().train)
    function.file.write_text("def train(*, width): ...\n")
    check_arguments(function, {"width": math.inf})
    function.file.write_text("def train(:\n")
    with pytest.raises(ClientError, match=r"recipes\.py"):
        check_arguments(function, {})
