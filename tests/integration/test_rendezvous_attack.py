"""An attacker reaches the rendezvous store of a running job without its secret."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launcher_pods import TIMEOUT, LauncherPods
from tests.support.pod_python import POD_PYTHON

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


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LauncherPods]:
    (tmp_path / "train.py").write_text(TRAIN)
    pods = LauncherPods(tmp_path, ["train.py"])
    yield pods
    pods.stop()


# A pickle that creates a folder when it is read, under the key of torchrun's own rendezvous and everywhere where the
# agents read. It extends a log: whoever overwrites that stops the rendezvous, as does whoever stops the store.
ATTACK = """
import os, pickle, sys
from torch.distributed import TCPStore

class Attack:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)

store = TCPStore("127.0.0.1", int(sys.argv[1]), wait_for_workers=False)
value = pickle.dumps(Attack())
for key in ("torch.rendezvous.RUN", "RUN/0/restart", "RUN/1/restart", "RUN/1/members", "RUN/closed"):
    store.set(key.replace("RUN", "run-1"), value)
for number in range(2):
    store.append(f"run-1/{number}/pods", value.decode("latin-1"))
"""


def attack(port: int, folder: Path) -> None:
    """Write to the store with the pods' own torch: other versions may have another protocol."""
    subprocess.run([POD_PYTHON, "-c", ATTACK, str(port), str(folder)], check=True, timeout=TIMEOUT)


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
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


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
