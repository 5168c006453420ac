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
# Whoever sets the environment, or the group, itself.
OTHERS = """
def set_environment(local_rank, processes):
    place = ("RANK", local_rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", processes)
    os.environ.update((name, str(number)) for name, number in place)
    assert Trainer(resolve("digits-resnet", settings)).fit().steps == 2
    assert not dist.is_initialized()


def make_group(local_rank, processes):
    dist.init_process_group("gloo", rank=local_rank, world_size=processes)
    assert Trainer(resolve("digits-resnet", settings), env=RankEnv.spawned(local_rank, processes)).fit().steps == 2
    assert dist.is_initialized()
"""
# spawn's own way to start processes, but for torch's import in each of them.
PROGRAM = """
function, port = arguments
settings = {"max_steps": 2, "model": {"width": 4}, "metrics": {"port": 0}}
os.environ["MASTER_PORT"] = port
del os.environ["OMP_NUM_THREADS"]  # which torch has read already: the trainer takes its share of the CPUs
mp.start_processes(globals()[function], args=(2,), nprocs=2, start_method="fork")
"""


@pytest.mark.parametrize("function", ["worker", "set_environment", "make_group"])
def test_ranks_that_a_program_spawns_train_together(tmp_path: Path, function: str) -> None:
    with HeldPort() as port:
        program = EXAMPLE + OTHERS + PROGRAM
        output = run_script(tmp_path, program, 1, arguments=[function, str(port.number)]).output(0)
    assert "training: 2 rank(s)" in output
    assert "epoch 1/1" in output or function != "worker"
