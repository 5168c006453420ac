"""An attacker reaches the rendezvous store of a running job without its secret."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.support.launcher_pods import LauncherPods

pytestmark = pytest.mark.process

TRAIN = """
import os, time, torch.distributed as dist
dist.init_process_group("gloo")
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", dist.get_rank(), "of", dist.get_world_size(), "restart", restart, flush=True)
assert "DDP_RENDEZVOUS_SECRET" not in os.environ
while not os.path.exists("enough"):
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""
RUN = "run-1"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LauncherPods]:
    (tmp_path / "train.py").write_text(TRAIN)
    pods = LauncherPods(tmp_path, ["train.py"])
    yield pods
    pods.stop()


class Attack:
    """A pickle that creates a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def attack(port: int, folder: Path) -> None:
    """Write the pickle under the key of torchrun's own rendezvous, and under every key that the agents read.

    A log is extended: overwriting it stops the rendezvous, as does stopping the store.
    """
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    value = pickle.dumps(Attack(folder))
    for key in (f"torch.rendezvous.{RUN}", f"{RUN}/0/restart", f"{RUN}/1/restart", f"{RUN}/1/members", f"{RUN}/closed"):
        store.set(key, value)
    for number in range(2):
        store.append(f"{RUN}/{number}/pods", value.decode("latin-1"))


def test_pickle_in_store_is_not_executed_and_disturbs_no_job(job: LauncherPods, tmp_path: Path) -> None:
    executed = tmp_path / "executed"
    job.start(0)
    job.until(lambda: can_connect(job.port), "pod 0 hosts the store")
    attack(job.port, executed)
    job.start(1)
    job.until_logged(1, "rank 1 of 2 restart 0")
    attack(job.port, executed)
    (tmp_path / "enough").touch()
    assert [job.wait(index).code for index in (0, 1)] == [0, 0]
    assert not executed.exists()
    assert "restart 1" not in job.log(0) + job.log(1)


def can_connect(port: int) -> bool:
    """Return whether a store listens on a port."""
    try:
        TCPStore("127.0.0.1", port, wait_for_workers=False)
    except RuntimeError:
        return False
    return True


def test_pod_without_secret_joins_no_round(job: LauncherPods, tmp_path: Path) -> None:
    outsider = LauncherPods(tmp_path, ["train.py"], env={"DDP_RENDEZVOUS_SECRET": "guessed"})
    outsider.port = job.port
    job.start(0)
    outsider.start(1)
    outsider.until(lambda: 'phase="Rendezvous"} 1' in outsider.page(1), "the outsider waits")
    (tmp_path / "port-1").unlink()
    job.start(1)
    job.until_logged(0, "rank 0 of 2 restart 0")
    job.until_logged(1, "rank 1 of 2 restart 0")
    (tmp_path / "enough").touch()
    assert [job.wait(index).code for index in (0, 1)] == [0, 0]
    outsider.stop()
