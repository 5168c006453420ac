from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from ddp_sdk.exporter import Exporter
from ddp_sdk.meters import AsyncScalars, Timeline
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.distributed.world import World
from ddp_trainer.observability.reporter import Reporter, format_duration
from ddp_trainer.observability.stopwatch import Stopwatch
from ddp_trainer.plan import Plan, Position
from tests.support.fake_gpu import FakeGpu

WORLD = World(RankEnv(), torch.device("cpu"))
NAN = math.nan
INF = math.inf


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    endpoint = Exporter.start(port=0, env=RankEnv())
    yield endpoint
    endpoint.close()


class ReporterHarness:
    """A reporter that receives losses and records its messages about bad ones."""

    def __init__(self, exporter: Exporter, log_every: int) -> None:
        self.exporter = exporter
        self.bad = list[tuple[int, float]]()
        self.reporter = Reporter(WORLD, exporter, log_every, lambda step, loss: self.bad.append((step, loss)))
        self.reporter.begin(Plan(1000, 1, False, 1, None, Position()))
        self.position = Position()

    def steps(self, *losses: float) -> None:
        for loss in losses:
            self.position.step += 1
            tensor = torch.tensor(loss)
            self.reporter.step(self.position, tensor, None, 1, 0.1, seconds=0.1, waited=0.0, computed=0.0)

    def value(self, name: str) -> float:
        return self.exporter._values[name]


def test_nonfinite_losses_are_counted_and_first_is_reported(exporter: Exporter) -> None:
    run = ReporterHarness(exporter, log_every=5)
    run.steps(1.0, 1.0, NAN, 1.0, INF)
    assert run.value("ddp_nonfinite_losses_total") == 2
    assert len(run.bad) == 1
    assert run.bad[0][0] == 3
    assert math.isnan(run.bad[0][1])
    run.steps(1.0, 1.0, 1.0, 1.0, INF)
    assert run.value("ddp_nonfinite_losses_total") == 3
    assert len(run.bad) == 1


def test_checked_losses_still_count_in_next_mean(exporter: Exporter, capsys: pytest.CaptureFixture[str]) -> None:
    run = ReporterHarness(exporter, log_every=4)
    run.steps(9.0, 1.0)  # the first step has a separate line
    run.reporter.check_losses()
    assert run.bad == []
    run.steps(2.0, 6.0)
    assert run.value("ddp_loss") == 3.0
    assert "step 4/1000 loss 3.0000" in capsys.readouterr().out
    run.steps(INF)
    assert run.bad == []
    run.reporter.check_losses()
    assert run.bad == [(5, INF)]
    run.reporter.check_losses()
    assert run.value("ddp_nonfinite_losses_total") == 1


def test_line_is_printed_after_copy_without_blocking_step(
    exporter: Exporter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = [False]
    monkeypatch.setattr(AsyncScalars, "ready", lambda self: arrived[0])
    run = ReporterHarness(exporter, log_every=2)
    run.steps(1.0, 2.0, 3.0, 4.0)
    assert "loss" not in capsys.readouterr().out
    assert "ddp_loss" not in exporter._values
    arrived[0] = True
    run.steps(5.0)
    message = capsys.readouterr().out
    assert (
        message.index("step 1/1000 loss 1.0000")
        < message.index("step 2/1000 loss 2.0000")
        < message.index("loss 3.5000")
    )
    arrived[0] = False
    run.steps(6.0)
    run.reporter.flush()
    assert "step 6/1000 loss 5.5000" in capsys.readouterr().out


def test_rate_includes_pending_device_work(
    exporter: Exporter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu
) -> None:
    monkeypatch.setattr(AsyncScalars, "ready", lambda self: gpu.host >= gpu.device)
    device = torch.device("cuda", 0)
    reporter = Reporter(World(RankEnv(), device), exporter, 5)
    timeline = Timeline(device)
    reporter.begin(Plan(1000, 1, False, 1, 10, Position()))
    position = Position()
    for _ in range(10):
        gpu.work(0.5, host=0.01)
        position.step += 1
        reporter.step(position, torch.tensor(1.0), None, 50, 0.1, seconds=0.01, waited=0.0, computed=0.0)
        if position.step == 7:  # a checkpoint: the host continues, the device copies
            before = timeline.now()
            gpu.work(9.0)
            reporter.pause(before, timeline.now())
    assert gpu.host == pytest.approx(0.1), "the host waited"
    reporter.flush()
    rates = [line.split(" samples/s")[0].split()[-1] for line in capsys.readouterr().out.splitlines() if "ETA" in line]
    assert rates == ["98", "100", "100"]  # the device was idle for the first hundredth of a second


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_counts_its_own_tokens_and_line_has_those_of_all_ranks(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    env = RankEnv(rank=rank, world_size=2)
    exporter = Exporter.start(port=0, env=env)
    reporter = Reporter(World(env, torch.device("cpu")), exporter, log_every=1)
    reporter.begin(Plan(1000, 2, False, 1, None, Position()), tokens=128)
    rates = []
    reporter._write = lambda step, figures: rates.append(figures)  # type: ignore[method-assign, assignment]
    reporter.step(Position(step=1), torch.tensor(1.0), None, 3, 0.1, seconds=0.1, waited=0.0, computed=0.0)
    exporter.close()
    assert exporter._values["ddp_tokens_total"] == 3 * 128
    assert rates[0]["train/tokens_per_second"] == pytest.approx(128 * rates[0]["train/samples_per_second"])


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (123, "2:03"), (3723.2, "1:02:03")])
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_laps_exclude_pauses_and_are_read_later(device: str, gpu: FakeGpu) -> None:
    timeline = Timeline(torch.device(device))
    watch = Stopwatch(torch.device(device))
    laps = []
    for paused in (0.0, 5.0):
        gpu.work(1.0, host=1.0)
        before = timeline.now()
        gpu.work(paused, host=paused)
        watch.pause(before, timeline.now())
        laps.append(watch.lap())
    # The host runs ahead of a GPU by a second of work, which the first lap includes.
    assert [lap() for lap in laps] == pytest.approx([1.0, 1.0] if device == "cpu" else [2.0, 1.0])


def test_scalars_of_any_shape_and_type_are_copied() -> None:
    scalars = AsyncScalars([torch.tensor([[2]]), torch.tensor(0.5, dtype=torch.float64), torch.tensor(True)])
    assert scalars.ready()
    assert scalars.read() == [2.0, 0.5, 1.0]
    assert AsyncScalars([]).read() == []
