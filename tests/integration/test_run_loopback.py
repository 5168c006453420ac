"""`ddp run` is not reachable from other machines: all its sockets listen on loopback addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ddp_run import DdpRun, manifest
from tests.support.listeners import is_loopback, list_family, list_listeners

pytestmark = pytest.mark.process

TRAIN = """
import os, pathlib, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
pathlib.Path(f"ready-{os.environ['RANK']}-{restart}").touch()
while not os.path.exists(f"go-{restart}"):
    time.sleep(0.05)
if restart == "0" and os.environ["RANK"] == "1" and os.path.exists("fail"):
    raise RuntimeError("broken on purpose")
dist.barrier()
dist.destroy_process_group()
"""
PYTHON = ["python", "train.py"]
SHELL = ["bash", "-c", "exec python train.py"]
ELASTIC = {"elastic": {"minNodes": 2, "maxNodes": 2}}
COLD = {"recovery": {"warmStart": "Off", "maxRestarts": 0}}
WARM = {"recovery": {"warmStart": "Auto", "maxRestarts": 0}}
INTERFACES = {"env": dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "eth0")}


@pytest.mark.parametrize(
    ("command", "spec"),
    [
        pytest.param(PYTHON, {"nodes": 2, **WARM, **INTERFACES}, id="two nodes, forked ranks"),
        pytest.param(PYTHON, {"nodes": 2, **ELASTIC, **COLD}, id="elastic, fresh interpreters"),
        pytest.param(PYTHON, {"nodes": 1, "procPerNode": 2, **WARM}, id="one node"),
        pytest.param(SHELL, {"nodes": 2, **COLD}, id="two nodes, a shell script"),
        pytest.param(PYTHON, {"nodes": 2, "rendezvous": {"backend": "static"}, **WARM}, id="static rendezvous"),
    ],
)
def test_local_run_listens_on_loopback_addresses_only(command: list[str], spec: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with DdpRun(tmp_path, manifest(command, **spec)) as run:
        run.until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "two ranks in one group")
        listeners = list_listeners(list_family(run.process.pid))
        (tmp_path / "go-0").touch()
        assert run.wait() == 0, run.output
    assert len(listeners) >= 1 + spec["nodes"], "at least a store, and a metrics page of each pod"
    assert [listener for listener in listeners if not is_loopback(listener[0])] == []


def test_shell_script_meets_at_new_store_after_restart_in_same_pods(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    for name in ("fail", "go-0", "go-1"):
        (tmp_path / name).touch()
    recovery = {"inPlaceRestarts": 1, "maxRestarts": 1}
    with DdpRun(tmp_path, manifest(SHELL, nodes=2, recovery=recovery)) as run:
        assert run.wait() == 0, run.output
        status = run.read_status()
    assert status["attempt"] == 1
    assert len(list(tmp_path.glob("ready-*-1"))) == 2
