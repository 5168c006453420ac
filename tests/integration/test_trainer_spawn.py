"""The trainer in a program that starts its ranks by torch.multiprocessing, as three of the documents do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.ports import HeldPort
from tests.support.trainer_ranks import run_script

pytestmark = pytest.mark.process

EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/trainer.md").read_text(encoding="utf-8"), re.DOTALL)[1]
# A program that sets the environment, or the group, itself.
OTHERS = """
from ddp_trainer import UserError

def set_environment(local_rank, processes):
    place = ("RANK", local_rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", processes)
    os.environ.update((name, str(number)) for name, number in place)
    assert Trainer(resolve("digits-resnet", settings)).fit().steps == 2
    assert not dist.is_initialized()


def make_group(local_rank, processes):
    dist.init_process_group("gloo", rank=local_rank, world_size=processes)
    assert Trainer(resolve("digits-resnet", settings), env=RankEnv.spawned(local_rank, processes)).fit().steps == 2
    assert dist.is_initialized()


def make_group_without_env(local_rank, processes):
    del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    settings["checkpoint"] = {"dir": f"{folder}/checkpoints"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=local_rank, world_size=processes)
    result = Trainer(resolve("digits-resnet", settings)).fit()
    assert (result.steps, result.checkpoint is None) == (2, local_rank != 0), result
    assert dist.is_initialized()


def contradict_group(local_rank, processes):
    os.environ.update(RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=local_rank, world_size=processes)
    try:
        Trainer(resolve("digits-resnet", settings)).fit()
    except UserError as error:
        print(f"refused: {error}", flush=True)
"""
# spawn's start method without torch's import in each process.
PROGRAM = """
function, port, folder = arguments
settings = {"max_steps": 2, "model": {"width": 4}, "metrics": {"port": 0}}
os.environ["MASTER_PORT"] = port
del os.environ["OMP_NUM_THREADS"]  # which torch has read already: the trainer takes its share of the CPUs
mp.start_processes(globals()[function], args=(2,), nprocs=2, start_method="fork")
"""


def run_function(folder: Path, function: str) -> str:
    """Run a function of the program in two processes that it spawns. Return their output."""
    with HeldPort() as port:
        arguments = [function, str(port.number), str(folder)]
        return run_script(folder, EXAMPLE + OTHERS + PROGRAM, 1, arguments=arguments).output(0)


@pytest.mark.parametrize("function", ["worker", "set_environment", "make_group", "make_group_without_env"])
def test_ranks_that_program_spawns_train_together(tmp_path: Path, function: str) -> None:
    output = run_function(tmp_path, function)
    assert output.count("training: 2 rank(s)") == 1
    assert "epoch 1/1" in output or function != "worker"


def test_initialized_group_that_contradicts_environment_is_refused(tmp_path: Path) -> None:
    output = run_function(tmp_path, "contradict_group")
    assert "training: " not in output
    for rank in range(2):
        problem = f"the initialized process group has rank {rank} of 2, but the environment or env= names rank 0 of 1"
        assert f"refused: distributed: {problem}" in output
