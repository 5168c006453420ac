"""Checkpoints in a store: real pods, with a folder as the store, and over HTTP in the nightly tier."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddp_pod.contract.plan import CheckpointStoreConfig, WatchdogConfig
from ddp_pod.torchrun.store import SignedStore
from tests.support.launcher_pods import LauncherPods, PodsFactory, launch_pods
from tests.support.object_store import FolderStore, ObjectStore
from tests.support.saved_states import load, same

pytestmark = pytest.mark.process

# Counts steps and stores the count. The test defines the event at a step.
TRAIN = """
import json, os, sys, time
folder, rank, size = os.environ["DDP_CHECKPOINT_DIR"], int(os.environ["RANK"]), int(os.environ.get("SIZE", "0"))
path = os.path.join(folder, "last.json")
step = json.load(open(path))["step"] if os.path.exists(path) else 0
print(f"rank {rank} begins at {step}", flush=True)
def stop(number, frame):
    global last
    last, os.environ["WAIT"] = step + 1, "-1"
last = int(os.environ["STEPS"])
import signal
signal.signal(signal.SIGTERM, stop)
while rank and not os.path.exists("over"):
    time.sleep(0.05)
while step < last and not rank:
    time.sleep(0.05)
    step += 1
    if step % int(os.environ.get("EVERY", "10")) == 0 or step == last:
        with open(path + ".tmp", "w") as file:
            json.dump({"step": step, "fill": os.urandom(size).hex()}, file)
        os.replace(path + ".tmp", path)
        print(f"saved {step}", flush=True)
    if step == int(os.environ.get("FAIL", "0")) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
    while step == int(os.environ.get("WAIT", "-1")):
        time.sleep(0.05)
open("over", "w").close()
"""
SHARDED = """
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

EPOCHS = int(os.environ.get("EPOCHS", "4"))

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)).to(device)
fully_shard(model[0])
fully_shard(model[2])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

folder = Path(os.environ.get("DDP_CHECKPOINT_DIR", "checkpoints"))
first = 0
complete = sorted(path.parent for path in folder.glob("epoch-*/.metadata"))  # DCP writes .metadata last
if complete:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=complete[-1])
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    first = int(complete[-1].name.removeprefix("epoch-"))
    print(f"resume after epoch {first}", flush=True)

for epoch in range(first, EPOCHS):
    for _ in range(10):
        inputs = torch.randn(32, 16, device=device)
        loss = torch.nn.functional.cross_entropy(model(inputs), (inputs.sum(dim=1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint = folder / os.environ.get("FOLDER", f"epoch-{epoch + 1:04}")
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}/{EPOCHS}: loss {loss.item():.4f}", flush=True)
    time.sleep(float(os.environ.get("PAUSE", "0")))
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if dist.get_rank() == 1 and is_first and epoch + 1 == int(os.environ.get("FAIL_AFTER", "0")):
        sys.exit(3)

dist.destroy_process_group()
"""
TRAINEE = [str(Path(__file__).parents[1] / "drills" / "trainee.py")]
Attempt = Callable[..., LauncherPods]
Store = FolderStore | ObjectStore


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.nightly)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = ObjectStore(tmp_path) if request.param == "s3" else FolderStore(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def attempt(tmp_path: Path, store: Store) -> Iterator[Attempt]:
    made: list[LauncherPods] = []

    def start(
        number: int, *, nodes: int = 1, restarts: int = 0, grace: int = 100, script: str = TRAIN, **env: object
    ) -> LauncherPods:
        folder = tmp_path / f"attempt-{number}"
        folder.mkdir()
        (folder / "train.py").write_text(script)
        config = {"checkpoint": CheckpointStoreConfig(store.url, 3), "watchdog": WatchdogConfig(900, 900, 10, "Report")}
        pods = LauncherPods(folder, ["train.py"], nodes=nodes, max_restarts=1, config=config)
        made.append(pods)
        about = {"DDP_ATTEMPT": number, "DDP_RUN_ID": f"job-{number}", "DDP_GRACE_SECONDS": grace, **env}
        for index in range(nodes):
            place = {"DDP_CHECKPOINT_DIR": str(folder / f"ckpt-{index}")}
            pods.env = {**store.env, **{name: str(value) for name, value in about.items()}, **place}
            pods.start(index)
        return pods

    yield start
    for pods in made:
        pods.stop()


def until_uploaded(pods: LauncherPods, store: Store, snapshots: int) -> None:
    pods.until(lambda: len(store.keys("snapshots")) >= snapshots, f"{snapshots} snapshots in the store")


def find_mirror(pods: LauncherPods) -> psutil.Process:
    children = psutil.Process(pods.running[0].pid).children()
    (result,) = (child for child in children if "mirror" in child.cmdline())
    return result


def test_all_ranks_resume_from_checkpoint_of_rank_0(attempt: Attempt, store: Store) -> None:
    pods = attempt(1, nodes=2, restarts=1, STEPS=25, EVERY=20, FAIL=20)
    ends = [pods.wait(0), pods.wait(1)]
    assert [end.code for end in ends] == [0, 0], ends[0].log
    for rank, end in enumerate(ends):
        assert f"rank {rank} begins at 0" in end.log
        assert f"rank {rank} begins at 20" in end.log
    assert len(store.keys("snapshots")) == 2


def test_replacement_of_killed_pod_resumes_from_store(attempt: Attempt, store: Store) -> None:
    first = attempt(1, STEPS=1000, WAIT=30)
    until_uploaded(first, store, 1)
    first.until(lambda: "ddp_checkpoint_upload_timestamp_seconds" in first.page(), "the page tells of the snapshot")
    first.signal(0, signal.SIGKILL)
    end = attempt(2, STEPS=35).wait(0)
    assert end.code == 0
    assert "rank 0 begins at 30" in end.log
    assert end.message["uploads"]["bytes"] > 0


@pytest.fixture
def create_pods(tmp_path: Path) -> Iterator[PodsFactory]:
    with launch_pods(tmp_path, TRAIN) as factory:
        yield factory


def test_pod_lost_before_its_upload_is_not_waited_for(tmp_path: Path, store: Store, create_pods: PodsFactory) -> None:
    config = {"checkpoint": CheckpointStoreConfig(store.url, 3), "join_timeout_seconds": 3600.0}
    job = create_pods("train.py", nodes=3, max_restarts=1, config=config)

    def start(index: int) -> None:
        job.env = {**store.env, "STEPS": "5", "DDP_CHECKPOINT_DIR": str(tmp_path / f"ckpt-{index}")}
        job.start(index)

    start(0)
    start(1)
    job.until(lambda: '"Rendezvous"' in job.page(1, "report"), "the agent of pod 1 joins the round")
    launcher = psutil.Process(job.running[1].pid)
    launcher.suspend()  # its agent will wait for it when the round is complete
    start(2)
    shared = SignedStore(TCPStore("127.0.0.1", job.port), "of these pods", "run-1")
    job.until(lambda: shared.read("0/members"), "all pods have joined")
    launcher.kill()
    job.running[1].wait(60)
    start(1)
    ends = [job.wait(index) for index in range(3)]
    assert [end.code for end in ends] == [0, 0, 0], "\n".join(end.log for end in ends)


def test_stopped_pod_uploads_last_checkpoint(attempt: Attempt, store: Store) -> None:
    first = attempt(1, STEPS=1000, WAIT=15)
    first.until_logged(0, "saved 10")
    first.signal(0, signal.SIGTERM)
    end = first.wait(0)
    assert end.code == 85
    last = end.log.rpartition("saved ")[2].split()[0]
    assert f"rank 0 begins at {last}\n" in attempt(2, STEPS=20).wait(0).log


def test_killed_mirror_is_restarted(attempt: Attempt, store: Store) -> None:
    pods = attempt(1, STEPS=60, WAIT=20)
    until_uploaded(pods, store, 1)
    find_mirror(pods).kill()
    pods.until_logged(0, "has ended unexpectedly: restarting it")
    pods.signal(0, signal.SIGTERM)
    assert pods.wait(0).code == 85
    assert "rank 0 begins at 21" in attempt(2, STEPS=25).wait(0).log


def test_success_needs_last_checkpoint_in_store(attempt: Attempt, store: Store, tmp_path: Path) -> None:
    if not isinstance(store, FolderStore):
        pytest.skip("a folder can be made useless in one step; a store over HTTP is, in the tests below")
    pods = attempt(1, STEPS=1000, WAIT=20)
    until_uploaded(pods, store, 1)
    (tmp_path / "store" / "objects").rename(tmp_path / "elsewhere")
    (tmp_path / "store" / "objects").write_text("no folder")
    Path(pods.folder / "ckpt-0" / "more").write_text("x")
    pods.until(lambda: '"problem"' in pods.page(path="report"), "the page tells the problem")
    (worker,) = (
        child for child in psutil.Process(pods.running[0].pid).children(recursive=True) if "worker" in child.cmdline()
    )
    worker.terminate()
    end = pods.wait(0)
    assert end.code == 82, end.log
    assert "training succeeded, but the last checkpoint was not uploaded" in end.message["message"]


def list_shards(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.distcp"))


def test_sharded_checkpoint_continues_in_new_pods(attempt: Attempt, store: Store) -> None:
    first = attempt(1, nodes=2, script=SHARDED, EPOCHS=3)
    ends = [first.wait(0), first.wait(1)]
    assert [end.code for end in ends] == [0, 0], ends[0].log + ends[1].log
    second = attempt(2, nodes=2, script=SHARDED, EPOCHS=5)
    ends = [second.wait(0), second.wait(1)]
    assert [end.code for end in ends] == [0, 0], ends[0].log + ends[1].log
    assert all("resume after epoch 3" in end.log for end in ends)
    shards = list_shards(second.folder / "ckpt-0")
    assert [f"epoch-0003/__{rank}_0.distcp" for rank in (0, 1)] == [path for path in shards if "-0003" in path]


def test_unusable_store_ends_pod_before_training(attempt: Attempt, store: Store, tmp_path: Path) -> None:
    if isinstance(store, FolderStore):
        (tmp_path / "store").write_text("no folder")
        store.url = f"nosuch://{tmp_path}"
    else:
        store.url = "s3://nosuchbucket/prefix"
    end = attempt(1, STEPS=10).wait(0)
    assert end.code == 81, end.log
    assert "begins at" not in end.log
    assert store.url in end.message["message"]


@pytest.mark.nightly
def test_trainer_ends_bit_by_bit_as_without_end_in_middle(store: Store, tmp_path: Path) -> None:
    arguments = [*TRAINEE, "--preset", "digits-resnet", "--model-width", "8", "--batch-size", "16", "--max-steps", "40"]
    arguments += ["--dropout", "0.2", "--checkpoint-every-steps", "5", "--checkpoint-keep", "1", "--log-every", "1"]

    def start(name: str, number: int, config: dict[str, object], pause: float) -> LauncherPods:
        folder = tmp_path / name
        folder.mkdir()
        pods = LauncherPods(folder, arguments, nodes=2, config=config)
        about = {"DRILL_FOLDER": folder, "DRILL_PAUSE": pause, "DDP_ATTEMPT": number, "DDP_RUN_ID": f"job-{number}"}
        for index in range(2):  # each pod has a separate disk; the reference's ranks share the first one
            about["DDP_CHECKPOINT_DIR"] = folder / f"ckpt-{index if config else 0}"
            pods.env = {**store.env, **{key: str(value) for key, value in about.items()}}
            pods.start(index)
        made.append(pods)
        return pods

    def read_losses(log: str) -> dict[str, str]:
        return dict(re.findall(r"step (\d+)\b.*?loss ([\d.]+)", log))

    made: list[LauncherPods] = []
    kept = {"checkpoint": CheckpointStoreConfig(store.url, 3), "watchdog": WatchdogConfig(900, 900, 100, "Report")}
    try:
        reference = start("reference", 1, {}, 0.0)
        whole, _ = (reference.wait(index) for index in range(2))
        first = start("first", 1, kept, 0.5)
        first.until(lambda: re.search(r"^ddp_checkpoint_upload_step [1-9]", first.page(), re.M), "a step in the store")
        for index in range(2):
            first.signal(index, signal.SIGKILL)
        first.stop()
        shutil.rmtree(first.folder)
        second = start("second", 2, kept, 0.0)
        ends = [second.wait(index) for index in range(2)]
        assert [end.code for end in ends] == [0, 0], ends[0].log
        losses = read_losses(ends[0].log)
        assert 0 < len(losses) < 40, ends[0].log
        assert losses.items() <= read_losses(whole.log).items()
        states = [load(max((pods.folder / "ckpt-0").glob("step-*40*.pt"))) for pods in (reference, second)]
        assert same(*states)
    finally:
        for pods in made:
            pods.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("state", ["down", "busy", "cut"])
def test_training_continues_while_store_is(state: str, tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    folder = tmp_path / "attempt-1"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    config = {"checkpoint": CheckpointStoreConfig(store.url, 3), "watchdog": WatchdogConfig(900, 900, 100, "Report")}
    place = {"DDP_CHECKPOINT_DIR": str(folder / "ckpt"), "DDP_ATTEMPT": "1", "DDP_RUN_ID": "job-1"}
    pods = LauncherPods(folder, ["train.py"], nodes=1, config=config)
    try:
        # The time between two saves is longer than a file needs to count as complete.
        pods.env = {**store.env, **place, "STEPS": "100000", "EVERY": "100", "SIZE": "200000"}
        pods.start()
        until_uploaded(pods, store, 1)
        store.wire.state = state
        pods.until(lambda: '"problem"' in pods.page(path="report"), "the page tells the problem")
        assert (store.wire.cuts > 0) or state != "cut"
        saved = pods.log(0).count("saved ")
        pods.until(lambda: pods.log(0).count("saved ") > saved, "another step is saved meanwhile")
        written = len(store.keys("snapshots"))
        store.wire.state = "up"
        pods.until_logged(0, "is available again")
        pods.signal(0, signal.SIGTERM)
        end = pods.wait(0)
        assert end.code == 85, end.log
        assert len(store.keys("snapshots")) > written
    finally:
        pods.stop()
        store.stop()
