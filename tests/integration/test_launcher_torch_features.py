"""Features of torchrun and of the launcher that depend on the version of torch in the pods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launcher_pods import PodsFactory, launch_pods

pytestmark = pytest.mark.process

RECORD = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise KeyError("a cause")

main()
"""
LOCAL_RANK = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int)
print("local rank", parser.parse_args().local_rank, flush=True)
"""
STEPS = """
import os, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
print("trained", flush=True)
while not os.path.exists("enough"):
    time.sleep(0.05)
"""


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodsFactory]:
    with launch_pods(tmp_path) as factory:
        yield factory


def test_exception_of_recorded_function_is_reported(pods: PodsFactory) -> None:
    (pod,) = pods("train.py", script=RECORD, nodes=1).run()
    assert (pod.code, pod.message["message"]) == (81, "KeyError: 'a cause'"), pod.log
    assert 'raise KeyError("a cause")' in pod.message["traceback"]


@pytest.mark.parametrize("flags", [[], ["--use-env"]])
def test_launch_module_passes_local_rank_unless_in_environment(pods: PodsFactory, flags: list[str]) -> None:
    command = ["python", "-m", "torch.distributed.launch", *flags, "train.py"]
    (pod,) = pods(*command, script=LOCAL_RANK, nodes=1, nproc=2).run()
    assert pod.code == 0, pod.log
    assert ("local rank 1" in pod.log) == (not flags)
    assert ("local rank None" in pod.log) == bool(flags)


def test_steps_of_unchanged_script_are_on_page(pods: PodsFactory, tmp_path: Path) -> None:
    job = pods("train.py", script=STEPS, nodes=1)
    job.start()
    job.until_logged(0, "trained")
    job.until(lambda: 'ddp_steps_total{rank="0"} 30' in job.page(), "the page has all steps")
    (tmp_path / "enough").touch()
    assert job.wait(0).code == 0, job.log(0)
