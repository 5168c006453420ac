"""Specs that exceed a limit: the operator refuses them and handles the next job."""

from __future__ import annotations

import gc
import re
import sys
import time
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

import pytest

from ddp_operator.api import completion
from ddp_operator.api.size import MAX_BYTES
from ddp_operator.reconcile import executor, fair_turns
from ddp_operator.reconcile.fair_turns import StepTooLong, run_limited
from tests.support.builders import page, template, trainer
from tests.support.fake_cluster import ReconcilerHarness

OVERSIZE = template(trainer(command=["bash", "-c", "\n" * MAX_BYTES]))
TRAINING = page(step=7, total_steps=10, loss=0.5, phase="Running")


def search_without_end() -> None:
    re.search(r"(a+)+b", "a" * 60)


def loop_without_end() -> None:
    while True:
        time.monotonic()


async def test_oversize_spec_is_refused_with_field_and_remedy() -> None:
    harness = await ReconcilerHarness(template=OVERSIZE).settle()
    assert harness.state("Accepted") == ("False", "InvalidSpec")
    message = harness.condition("Accepted").message
    assert message.startswith("spec.template.spec.containers[0].command[2]: ")
    assert "256 KiB" in message
    assert "does not match this operator" not in message
    assert (harness.status.phase, harness.jobs(), harness.requeue) == ("Rejected", [], 300)
    harness.edit(template=template())
    await harness.settle()
    assert (harness.state("Accepted"), harness.jobs()) == (("True", "Valid"), ["train-1"])


async def test_running_job_keeps_pods_while_its_spec_is_oversize() -> None:
    harness = await ReconcilerHarness().train(TRAINING)
    harness.edit(template=OVERSIZE)
    await harness.settle()
    assert harness.state("Accepted") == ("False", "InvalidSpec")
    assert "the job's pods keep running" in harness.condition("Accepted").message
    assert (harness.status.phase, harness.jobs()) == ("Running", ["train-1"])


@pytest.mark.parametrize("step", [search_without_end, loop_without_end])
def test_step_without_end_is_interrupted(monkeypatch: pytest.MonkeyPatch, step: Any) -> None:
    monkeypatch.setattr(fair_turns, "STEP_SECONDS", 0.2)
    with pytest.raises(StepTooLong, match="CPU time"):
        run_limited(step)
    assert run_limited(max, 1, 2) == 2


@pytest.mark.parametrize(("module", "name"), [(completion, "parse_resource"), (executor, "build_children")])
async def test_check_without_end_refuses_only_its_job(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    def check(*_: Any, **__: Any) -> Any:
        search_without_end()

    harness = ReconcilerHarness()
    with monkeypatch.context() as patch:
        patch.setattr(fair_turns, "STEP_SECONDS", 0.2)
        patch.setattr(module, name, check)
        await harness.settle()
        assert harness.state("Accepted") == ("False", "InvalidSpec")
        assert "a check took more than" in harness.condition("Accepted").message
    harness.clock.advance(300)
    await harness.settle()
    assert harness.jobs() == ["train-1"]


def test_step_that_catches_interruption_is_interrupted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def catch_once() -> None:
        with suppress(ValueError):
            loop_without_end()
        loop_without_end()

    monkeypatch.setattr(fair_turns, "STEP_SECONDS", 0.1)
    with pytest.raises(StepTooLong):
        run_limited(catch_once)


def measure(root: object) -> int:
    """Return the bytes of all objects that an object refers to, without modules, classes and functions."""
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) not in seen and not isinstance(item, type | ModuleType | FunctionType):
            seen[id(item)] = item
            waiting += gc.get_referents(item)
    return sum(map(sys.getsizeof, seen.values()))


@pytest.mark.parametrize("own", [{"suspend": True}, {}, {"nodes": 0}], ids=str)
async def test_spec_is_not_kept_after_pass(own: dict[str, Any]) -> None:
    variables = [{"name": f"V{number}", "value": "x" * 40} for number in range(3000)]
    harness = ReconcilerHarness(template=template(trainer(env=variables)), **own)
    await harness.settle()
    assert measure(harness.reconciler._memory) < 20_000
