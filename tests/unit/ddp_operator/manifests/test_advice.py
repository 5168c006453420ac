"""Warnings about valid training commands."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from ddp_operator.manifests.advice import list_warnings
from ddp_operator.manifests.template import resolve_template
from tests.support.builders import job, template, trainer


def warn(command: str, nproc: int = 4, *, in_cluster: bool = True, **container: Any) -> str:
    made = template(trainer(**{"command": shlex.split(command) or None, **container}))
    warnings = list_warnings(resolve_template(job(template=made, procPerNode=nproc)), in_cluster=in_cluster)
    return "\n".join(warnings)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("set -e; mkdir work; cp train.py work/; python work/train.py", "`mkdir work`, `cp train.py work/`: "),
        ("git clone https://x y && cd y && python t.py", "`git clone https://x y`: "),
        ("pip install -r r.txt\npython3 -m pip install x\nuv pip install z\napt-get update; python t.py",
         "`pip install -r r.txt`, `python3 -m pip install`, `uv pip install z` and 1 more: "),
        ("wget http://x; python t.py", "`wget http://x`: "),
        ("mkdir -p x; cd x; export A=1; python t.py --cp x", ""),
        ("if [ $LOCAL_RANK = 0 ]; then pip install x; fi; python t.py", ""),
        ("[ $LOCAL_RANK = 0 ] && git clone x\npython t.py", ""),
        ("python t.py", ""),
    ],
)  # fmt: skip
def test_set_up_that_each_rank_repeats_is_named(text: str, named: str) -> None:
    warning = warn(f"bash -c {shlex.quote(text)}")
    assert (f"runs once in each of the 4 ranks of a pod, also {named}" in warning) is bool(named)
    assert warn(f"bash -c {shlex.quote(text)}", 1) == ""


def test_args_without_command_are_named_for_clusters() -> None:
    assert "the image's entrypoint does not run" in warn("", args=["python", "train.py"])
    assert warn("", args=["python", "train.py"], in_cluster=False) == ""
    assert warn("python", args=["train.py"]) == ""


def test_hidden_exit_code_is_named() -> None:
    assert "container trainer hides failures" in warn("sh -c 'python t.py || true'")
