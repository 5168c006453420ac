"""A launcher on standby, and the pipe from which it reads its run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_pod.contract.names import ENV_RUN_FD
from ddp_pod.contract.plan import CodeConfig
from ddp_pod.features.dev import standby
from ddp_pod.features.dev.standby import RunStart, Standby, encode_start
from tests.support.launcher_config import launcher_pod


def test_pipe_of_a_launcher_on_standby_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "set_parent_death_signal", lambda parent: None)
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    environment = {ENV_RUN_FD: str(reader)}
    assert standby.find_standby(environment) is not None
    assert not environment
    assert not os.get_inheritable(reader)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("archive", ["", "/runtime/code-2"])
def test_run_has_its_own_code_or_that_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: str
) -> None:
    monkeypatch.setattr(standby, "set_parent_death_signal", lambda parent: None)
    reader, writer = os.pipe()
    with open(writer, "wb") as pipe:
        pipe.write(encode_start(RunStart(("train.py", "--x"), archive, "new", "former")))
    code = CodeConfig(archive="/plan", digest="old", folder="/code", packages="/packages", requirements=())
    run = Standby(reader).wait(launcher_pod(tmp_path, code=code))
    assert run is not None
    assert (run.command, run.former) == (["train.py", "--x"], "former")
    assert run.pod.code is not None
    assert (run.pod.code.archive, run.pod.code.digest) == ((archive, "new") if archive else ("/plan", "old"))


def test_launcher_that_is_not_needed_has_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "set_parent_death_signal", lambda parent: None)
    reader, writer = os.pipe()
    os.close(writer)
    assert Standby(reader).wait(launcher_pod(tmp_path)) is None
