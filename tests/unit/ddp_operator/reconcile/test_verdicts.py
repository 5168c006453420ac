"""Checks of a spec: once for each spec, however often the job is touched."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api import completion
from ddp_operator.api.size import MAX_BYTES
from ddp_operator.reconcile import executor
from ddp_operator.reconcile.verdicts import LIFETIME, MAX_TEXT
from tests.support.builders import template, trainer
from tests.support.fake_cluster import ReconcilerHarness

SCRIPT = template(trainer(command=["bash", "-c", "python train.py\n" * 100]))
INVALID = template(trainer(env=[{"name": "RANK", "value": "1"}]))
UNREADABLE = {"nodes": "two"}
OWN = "ddp-operator.dev/touched"


class Counted:
    """A check that counts its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.calls = 0
        self._check = getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._check(*args, **kwargs)


async def touch(harness: ReconcilerHarness, annotation: str = OWN) -> None:
    """Annotate the job three times."""
    for number in range(3):
        assert harness.raw is not None
        harness.cluster.store.change(harness.raw, meta={"annotations": {annotation: str(number)}})
        await harness.settle()


async def test_touched_suspended_job_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Counted(monkeypatch, executor, "build_children")
    harness = await ReconcilerHarness(template=SCRIPT, suspend=True).settle()
    await touch(harness)
    assert build.calls == 1
    assert harness.cluster.calls.count("dry-run Job") == 1
    harness.edit(nodes=3)
    await harness.settle()
    assert build.calls == 2


@pytest.mark.parametrize(
    ("spec", "module", "name"),
    [({"template": INVALID}, executor, "build_children"), (UNREADABLE, completion, "parse_resource")],
    ids=["invalid", "unreadable"],
)
async def test_refusal_is_kept_for_unchanged_spec(
    monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], module: Any, name: str
) -> None:
    check = Counted(monkeypatch, module, name)
    harness = await ReconcilerHarness(**spec).settle()
    message = harness.condition("Accepted").message
    calls = check.calls
    assert calls == 1
    await touch(harness)
    assert (check.calls, harness.condition("Accepted").message) == (calls, message)
    harness.clock.advance(LIFETIME.total_seconds())
    await harness.reconcile()
    assert check.calls > calls


async def test_kept_refusal_is_short() -> None:
    name = "x" * (MAX_BYTES // 2)
    harness = await ReconcilerHarness(**{name: 1}).settle()
    [memory] = harness.reconciler._memory.values()
    assert 0 < len(memory.unreadable.text) <= MAX_TEXT
