"""Checks of a job together with the folder of its code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from ddp_cli.client.workdir import Workdir, check_job
from ddp_operator.api.errors import InvalidManifest
from tests.support.builders import resource, template, trainer

SCRIPT = "#!/bin/bash\nset -e\ntorchrun --nproc_per_node=$N train.py ok 200\n"


def check(command: list[str], workdir: Workdir | None, *, in_cluster: bool = False, **container: str) -> None:
    text = yaml.safe_dump(resource(nodes=2, template=template(trainer(command=command, **container))))
    check_job(text, workdir, in_cluster=in_cluster, note=lambda _: None)


@pytest.mark.parametrize(
    "command", [["bash", "run.sh"], ["env", "N=2", "./run.sh"], ["sh", "-c", "cd . && . ./run.sh"]]
)
def test_launcher_in_script_of_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    for workdir in (Workdir(tmp_path), None):
        monkeypatch.chdir(tmp_path if workdir is None else "/")
        with pytest.raises(InvalidManifest, match=r"in \S*run.sh, write `python3 train.py` instead of `torchrun --np"):
            check(command, workdir)


def test_script_that_pod_does_not_run_or_that_cannot_be_read_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "long.sh").write_text(f"{SCRIPT}#{'x' * 70_000}")
    (tmp_path / "safe.sh").write_text("python train.py; bash safe.sh")
    os.mkfifo(tmp_path / "pipe.sh")
    monkeypatch.chdir(tmp_path)
    check(["bash", "run.sh"], None, in_cluster=True)
    check(["bash", "run.sh"], None, workingDir="/app")
    for path in ("long.sh", "safe.sh", "pipe.sh", "missing.sh", "x" * 5000, "\0"):
        check(["bash", path], None)
