"""Copies in memory of state on a GPU: killed ranks and lost pods continue with the same weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.gpu.small_runs import BACKEND, DEVICE, gpu_only, load_weights, on_device, train_in_process
from tests.integration.test_memory_checkpoint import REPLICATED, SHARDED, Group

pytestmark = on_device


@pytest.mark.parametrize(
    ("script", "backend", "ranks"),
    # Two ranks share the GPU, which NCCL refuses.
    [(REPLICATED, "gloo", 2), (SHARDED, BACKEND, 1), pytest.param(REPLICATED, BACKEND, 1, marks=gpu_only)],
    ids=["ddp-2", "fsdp2-1", "ddp-1"],
)
def test_killed_rank_continues_from_copy_of_gpu_state(script: str, backend: str, ranks: int, tmp_path: Path) -> None:
    group = Group(script.replace('"gloo"', repr(backend)), tmp_path)
    assert group.run(8, ranks=ranks, DEVICE=DEVICE), group.output
    undisturbed = group.final
    shutil.rmtree(group.memory)

    assert not group.run(8, ranks=ranks, DEVICE=DEVICE, FAIL_RANK=0, FAIL_STEP=5)
    if ranks > 1:
        group.lose_pod(0)
    assert group.run(8, ranks=ranks, DEVICE=DEVICE), group.output
    # The GPU may not have completed the last steps when the host was killed.
    assert re.search(r"training continues from step [3-6], copied in memory", group.output), group.output
    assert group.final == undisturbed


def test_killed_trainer_continues_from_copy_of_gpu_state(tmp_path: Path) -> None:
    # An epoch of 15 steps, so that the copies are newer than the checkpoint at its end.
    options = ["--model", "tests.support.trainer_plugins:interrupting", "--batch-size", "4", "--epochs", "3"]
    options += ["--deterministic", "true"]
    whole = train_in_process(tmp_path / "whole", *options)
    assert whole.returncode == 0, whole.stdout
    memory = {"DDP_MEMORY_DIR": str(tmp_path / "memory"), "DDP_MEMORY_INTERVAL": "1"}
    killed = train_in_process(tmp_path / "cut", *options, **memory, TEST_INTERRUPT="0:28:SIGKILL")
    assert killed.returncode == -9, killed.stdout
    resumed = train_in_process(tmp_path / "cut", *options, **memory)
    assert resumed.returncode == 0, resumed.stdout
    assert re.search(r"resumed from memory: 2[0-7] steps are done", resumed.stdout), resumed.stdout
    expected = load_weights(tmp_path / "whole")
    weights = load_weights(tmp_path / "cut")
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
