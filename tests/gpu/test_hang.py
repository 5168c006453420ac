"""A hang on one GPU: the real launcher names the collective in which a rank waits, from NCCL's flight recorder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from ddp_operator.manifests.torchrun import split_user_command
from ddp_pod.contract.plan import WatchdogConfig
from tests.gpu.small_runs import BACKEND, DEVICE, on_device
from tests.support import PATIENCE, ROOT
from tests.support.launcher_config import encoded_config
from tests.support.ports import HeldPort

pytestmark = on_device

# One rank has the GPU to itself, because NCCL refuses a second one: its all-reduce waits for a kernel of 20 s.
RANKS = 1 if DEVICE == "cuda" else 2
TRAIN = """
import sys, time, torch, torch.distributed as dist

backend, device, reports = sys.argv[1:]
dist.init_process_group(backend)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if reports == "exporter":
    from ddp_sdk.exporter import Exporter
    exporter = Exporter.start()

def train_step(step):
    if step == 20 and device == "cuda":
        torch.cuda._sleep(40_000_000_000)
    if step == 20 and dist.get_rank() == 1:
        time.sleep(20)
    loss = model(torch.randn(8, 4, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if reports == "exporter":
        exporter.step(samples=8, loss=loss.detach())
    loss.item()

for step in range(40):
    train_step(step)
    time.sleep(0.1)
dist.destroy_process_group()
"""
COLLECTIVE = re.compile(r"all_?reduce \d+ of the default group, shape \[10\]", re.IGNORECASE)


def write_launcher(folder: Path) -> Path:
    """Write the launcher as pods have it, without the operator's packages. Return the path of the program."""
    package = ROOT / "operator" / "ddp_pod"
    with zipfile.ZipFile(folder / "launcher.zip", "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, path.relative_to(package))
    return Path(shutil.copy(package / "bootstrap.py", folder / "launcher.py"))


def run_pod(folder: Path, reports: str, action: str) -> tuple[int, str]:
    """Run the job in a pod. Return the launcher's exit code and log."""
    (folder / "train.py").write_text(TRAIN)
    command = split_user_command(["train.py", BACKEND, DEVICE, reports], [])
    watchdog = WatchdogConfig(start_seconds=100, stall_seconds=4, checkpoint_seconds=8, action=action)
    with HeldPort() as held:
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(held.number),
            **encoded_config(nproc_per_node=RANKS, watchdog=watchdog),
            "DDP_RENDEZVOUS_SECRET": "of this pod",
            "DDP_METRICS_PORT": "0",
            "DDP_TERMINATION_LOG": str(folder / "termination"),
            "JOB_COMPLETION_INDEX": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "trainer"),
            "TORCH_FR_BUFFER_SIZE": "2000",
        }
        argv = [sys.executable, str(write_launcher(folder)), "run"]
        with (folder / "log").open("w") as log:
            code = subprocess.call(
                [*argv, "--", *command.argv], env=env, cwd=folder, stdout=log, stderr=log, timeout=PATIENCE
            )
    return code, (folder / "log").read_text(errors="replace")


def test_hang_with_exporter_fails_job_and_names_collective(tmp_path: Path) -> None:
    code, log = run_pod(tmp_path, "exporter", "Fail")
    assert code == 81, log
    end = json.loads((tmp_path / "termination").read_text())
    assert end["category"] == "Hang", log
    assert COLLECTIVE.search(end["message"]), end


def test_hang_of_counted_steps_is_reported_with_collective(tmp_path: Path) -> None:
    code, log = run_pod(tmp_path, "counted", "Report")
    assert code == 0, log
    assert re.search(r"hang: no step for \d+ s", log), log
    assert COLLECTIVE.search(log), log
