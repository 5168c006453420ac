"""Compare steps read from lines of training loops with the true counter: the step, its total, and its unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest

from ddp_operator.api.status import Progress
from ddp_operator.decide.report import build_progress
from ddp_pod.progress.line_progress import LineProgress
from ddp_pod.progress.line_steps import find_metrics, find_total
from ddp_pod.rank.counters import RankCounters

NOW = 1_700_000_000.0
PER_EPOCH = 100
EPOCHS = 10


class Moment(NamedTuple):
    """A run of 10 epochs with 100 steps each, at one printed line. ``step`` counts the whole run, from 1."""

    step: int

    @property
    def epoch(self) -> int:
        return (self.step - 1) // PER_EPOCH

    @property
    def batch(self) -> int:
        return (self.step - 1) % PER_EPOCH + 1


Format = Callable[[Moment], str]


class LineRun:
    """Feeds lines as the log reader does."""

    def __init__(self, epochs: int | None = None, steps: int | None = None, first_step: int | None = None) -> None:
        self.counted = 0
        self.first_step = first_step
        self.epoch: int | None = None
        self.progress = LineProgress(self._read, epochs, steps)

    def _read(self) -> RankCounters:
        return RankCounters(
            pid=1,
            rank=0,
            world_size=2,
            is_counted=True,
            is_recorded=False,
            steps=self.counted,
            last_step_time=0.0,
            step_seconds=0.0,
            longest_step=0.0,
            work_seconds=None,
            samples=None,
            learning_rate=None,
            loss=None,
            first_step=self.first_step,
            epoch=self.epoch,
        )

    def print(self, line: str, counted: int) -> bool:
        self.counted = counted
        return self.progress.feed(line.encode() + b"\n", NOW)

    def train(self, shape: Format, steps: Iterable[int], resumed: int = 0) -> LineRun:
        for step in steps:
            self.print(shape(Moment(step)), step - resumed)
        return self

    @property
    def status(self) -> Progress | None:
        return build_progress(self.progress.build(0))

    @property
    def shown(self) -> tuple[object, ...] | None:
        status = self.status
        return None if status is None else (status.step, status.total_steps, status.loss)


def as_bar(done: int, total: int) -> str:
    return f"{100 * done // total:3}%|{'█' * (10 * done // total):10}| {done}/{total} [00:0{done % 7}<00:09, 12.34it/s"


OF_THE_RUN: dict[str, Format] = {  # with the number of all steps
    "counter in brackets": lambda at: f"[  {at.step}/1000] loss=1.234 (12.3 it/s)",
    "step of total": lambda at: f"step {at.step}/1000 | loss: 1.234 | lr 1e-3",
    "step out of total": lambda at: f"Step {at.step} of 1000 - train loss 1.234",
    "iteration": lambda at: f" iteration {at.step:8}/  1000 | consumed samples: {at.step * 64} | lm loss: 1.234E+00 |",
    "dict with a total": lambda at: f"{{'step': '{at.step}/1000', 'loss': 1.234}}",
    "tqdm": lambda at: f"\r{as_bar(at.step, 1000)}, loss=1.234]",
    "plain tqdm with a time stamp": lambda at: f"2026-11-24 14:0{at.step % 7}:01,123 INFO {at.step}/1000 loss=1.234",
    "thousands": lambda at: f"step {at.step:,}/1,000: loss 1.234",
}
WITHOUT_A_TOTAL: dict[str, Format] = {
    "comma": lambda at: f"Epoch {at.epoch + 1}, Step {at.step}, Loss: 1.234",
    "dict": lambda at: f"{{'step': {at.step}, 'loss': 1.234}}",
    "json": lambda at: f'{{"loss": 1.234, "lr": 1e-0{at.step % 7 + 1}, "step": {at.step}}}',
    "nanoGPT": lambda at: f"iter {at.step}: loss 1.234, time 275.05ms, mfu {at.step % 50}.00%",
    "key and value": lambda at: f"[rank0] global_step={at.step} loss=1.234 grad_norm=0.5",
    "column": lambda at: f"{at.step:>8}  1.234  0.01 loss 1.234",
    "colon": lambda at: f"Step: {at.step}\tloss: 1.234",
    "log prefix": lambda at: f"INFO:root:step={at.step} train/loss=1.234",
}
OF_AN_EPOCH: dict[str, Format] = {
    "tutorial": lambda at: f"Epoch [{at.epoch + 1}/10], Step [{at.batch}/100], Loss: 1.234",
    "timm": lambda at: (
        f"Train: {at.epoch} [ {at.batch:3}/100 ({at.batch}%)]  Loss: 1.234 (0.732)  Time: 0.522s, 15.3/s"
    ),
    "gan": lambda at: f"[{at.epoch}/10][{at.batch}/100] Loss_D: 0.5 loss: 1.234",
    "metric logger": lambda at: f"Epoch: [{at.epoch}]  [ {at.batch}/100]  eta: 0:00:00  lr: 0.1  loss: 1.234 (0.5000)",
    "mnist": lambda at: f"Train Epoch: {at.epoch + 1} [{at.batch * 64}/6400 ({at.batch}%)]\tLoss: 1.234",
    "tqdm of an epoch": lambda at: f"\rEpoch {at.epoch}: {as_bar(at.batch, 100)}, v_num=2, train_loss=1.234]",
    "word model": lambda at: f"| epoch {at.epoch + 1:3} | {at.batch:5}/  100 batches | lr 20.00 | loss 1.234 | ppl 9.1",
    "ignite": lambda at: f"Epoch [{at.epoch + 1}/10]: [{at.batch}/100]  {at.batch}%|███▎   , loss=1.234 [00:00<00:00]",
}
WHOLE_EPOCHS: dict[str, Format] = {
    "one line": lambda at: f"Epoch {at.epoch + 1}/10: loss 1.234",
    "train and val": lambda at: f"epoch {at.epoch + 1}/10 train_loss=1.234 val_loss=2.5 time 12.1s",
}


@pytest.mark.parametrize("shape", OF_THE_RUN.values(), ids=OF_THE_RUN)
def test_total_beside_the_step_is_the_total_of_the_run(shape: Format) -> None:
    assert LineRun().train(shape, range(10, 61, 10)).shown == (60, 1000, "1.234")


@pytest.mark.parametrize("shape", OF_THE_RUN.values(), ids=OF_THE_RUN)
def test_lines_of_every_step_are_recognized_too(shape: Format) -> None:
    assert LineRun().train(shape, range(1, 30)).shown == (29, 1000, "1.234")


@pytest.mark.parametrize("shape", WITHOUT_A_TOTAL.values(), ids=WITHOUT_A_TOTAL)
def test_step_without_a_total_is_the_step(shape: Format) -> None:
    assert LineRun().train(shape, range(10, 61, 10)).shown == (60, None, "1.234")
    assert LineRun(steps=1000).train(shape, range(10, 61, 10)).shown == (60, 1000, "1.234")


@pytest.mark.parametrize("shape", OF_AN_EPOCH.values(), ids=OF_AN_EPOCH)
def test_step_of_an_epoch_becomes_a_step_of_the_run(shape: Format) -> None:
    assert LineRun(epochs=EPOCHS).train(shape, range(10, 251, 10)).shown == (250, 1000, "1.234")


def test_total_that_is_the_last_index_counts_from_zero() -> None:
    run = LineRun().train(lambda at: f"iteration {at.step - 1}/59 | loss: 1.234", range(1, 61))
    assert run.shown == (60, 60, "1.234")
    done = LineRun()
    done.print("step 0/60 loss 1.234", 0)  # a number of what is done
    assert done.train(lambda at: f"step {at.step}/60 loss 1.234", range(1, 61)).shown == (60, 60, "1.234")


def test_last_epoch_that_trains_on_counts_from_zero() -> None:
    run = LineRun()
    for step in range(1, 61):
        run.print(f"Epoch {(step - 1) // 20}/2 {(step - 1) % 20 + 1}/20 loss: 1.234", step)
    status = run.status
    assert status is not None
    assert (status.step, status.total_steps, status.epoch, status.epochs) == (60, 60, 3, 3)


@pytest.mark.parametrize(
    ("first", "last", "epochs", "seen"),
    [
        (1, 2, None, [None, None, 3]),  # a bar may show the last index
        (1, 2, 3, [3, 3, 3]),  # by an option of the command
        (0, 2, None, [None, 3, 3]),  # the steps count to the last index, too
        (0, 3, None, [None, 3, 3]),  # the steps count from 0, but not to it
        (1, 29, None, [29, 29, 29]),
    ],
)
def test_epochs_from_zero_have_no_total_while_two_are_possible(
    first: int, last: int, epochs: float | None, seen: list[float | None]
) -> None:
    run = LineRun(epochs=epochs)
    shown = []
    end = 20 - (last == 2 and not first)
    for step in range(1, 61):
        epoch, batch = divmod(step - 1, 20)
        run.print(f"Epoch {epoch}/{last}: {batch + first}/{end} loss 1.234", step)
        status = run.status
        if batch == 19:
            shown.append(None if status is None else status.epochs)
    assert shown == seen


def test_total_of_cross_validation_is_that_of_all_folds() -> None:
    run = LineRun()
    totals = set()
    for step in range(2, 601, 2):
        fold, rest = divmod(step - 1, 200)
        epoch, batch = divmod(rest, 100)
        run.print(f"Fold {fold + 1}/3 Epoch [{epoch + 1}/2], Step [{batch + 1}/100], Loss: 1.234", step)
        totals.add((run.shown or (0, None))[1])
    assert run.shown == (600, 600, "1.234")
    assert totals == {None, 600}


@pytest.mark.parametrize("shape", OF_AN_EPOCH.values(), ids=OF_AN_EPOCH)
def test_step_of_an_epoch_is_no_total_before_the_second_epoch(shape: Format) -> None:
    shown = LineRun().train(shape, range(10, 101, 10)).shown
    assert shown is not None
    assert shown[1] in (None, 1000)


def test_total_of_the_only_epoch_is_the_total_of_the_run() -> None:
    lines = (f"[0/1][{step}/100] Loss_D: 0.5 Loss_G: 1.234" for step in range(0, 31, 10))
    run = LineRun()
    for step, line in enumerate(lines):
        run.print(line, 10 * step + 1)
    status = run.status
    assert status is not None
    assert (status.step, status.total_steps, status.epochs) == (31, 100, 1)


@pytest.mark.parametrize("shape", WHOLE_EPOCHS.values(), ids=WHOLE_EPOCHS)
def test_line_of_an_epoch_shows_steps_and_total_of_the_run(shape: Format) -> None:
    assert LineRun().train(shape, range(100, 501, 100)).shown == (500, 1000, "1.234")


@pytest.mark.parametrize("shape", [*OF_THE_RUN.values(), *WITHOUT_A_TOTAL.values()])
def test_resumed_run_shows_its_true_step(shape: Format) -> None:
    shown = LineRun().train(shape, range(310, 361, 10), resumed=300).shown
    assert shown is not None
    assert shown[0] == 360


@pytest.mark.parametrize("shape", OF_AN_EPOCH.values(), ids=OF_AN_EPOCH)
def test_resumed_run_with_the_optimizers_state_shows_its_true_step(shape: Format) -> None:
    run = LineRun(epochs=EPOCHS, first_step=300).train(shape, range(310, 451, 10), resumed=300)
    assert run.shown == (450, 1000, "1.234")


def test_resumed_run_with_whole_epochs_shows_its_true_step() -> None:
    run = LineRun().train(WHOLE_EPOCHS["one line"], range(500, 801, 100), resumed=400)
    assert run.shown == (800, 1000, "1.234")


@pytest.mark.parametrize(
    "text",
    [
        "Downloading: {0}/1000",
        "loaded 3/10 shards",
        "Validation: {0}/1000 [00:01<00:00, loss=0.5]",
        "seed {0}",
        "epoch 1/20: checkpoint saved, 3 files",
        "GPU 0: 37C 120W",
        "loss 0.5",
        "2026-11-24 10:00:{0:02} still here",
        "random {1}",
        "version 1.{0}.3 took {0}ms at {0}%",
    ],
)
def test_line_that_does_not_follow_the_counter_shows_nothing(text: str) -> None:
    run = LineRun()
    randoms = [7, 3, 9, 1, 4, 8, 2, 6, 5]
    found = [run.print(text.format(i, random), 40 * i) for i, random in enumerate(randoms)]
    assert not any(found)
    assert run.status is None


def test_bar_of_a_validation_is_not_the_step() -> None:
    run = LineRun()
    for epoch in range(3):
        for batch in range(1, 9):
            run.print(f"\r{as_bar(8 * epoch + batch, 24)}]", 8 * epoch + batch)
        for batch in range(1, 9):
            run.print(f"\r{as_bar(batch, 8)}]\x1b[A", 8 * epoch + 8)
        run.print(f"{{'eval_loss': '1.295', 'epoch': '{epoch + 1}'}}", 8 * epoch + 8)
    status = run.status
    assert status is not None
    assert (status.step, status.total_steps, status.val_loss) == (24, 24, "1.295")


def test_total_that_contradicts_the_counter_is_dropped() -> None:
    run = LineRun(steps=50).train(WITHOUT_A_TOTAL["colon"], range(10, 91, 10))
    assert run.shown == (90, None, "1.234")


def test_late_reader_of_a_fast_loop_finds_the_step() -> None:
    run = LineRun()
    for step in range(0, 3000, 300):
        lines = "\n".join(f"step {at}/3000 loss 0.5" for at in range(step, step + 300))
        run.print(lines, min(step + 310, 3000))
        run.progress._second = 0  # one second later
    status = run.status
    assert status is not None
    assert status.total_steps == 3000
    assert status.step == 3000


def test_accumulated_batches_are_divided() -> None:
    run = LineRun()
    for batch in range(40, 401, 40):
        run.print(f"batch {batch}/4000 loss 0.5", batch // 4)
    assert run.shown == (100, 1000, "0.5")


def test_lines_that_are_read_late_show_the_true_total_and_the_counted_step() -> None:
    run = LineRun(epochs=2)
    for step in range(2, 81, 2):
        batch = (step - 1) % 40 + 1
        run.print(f"Train Epoch: {(step - 1) // 40 + 1} [{16 * batch}/640 (5%)]\tLoss: 1.234", step + (step % 8 == 0))
    assert run.shown == (81, 81, "1.234"), "the last line was read a step late"
    assert LineRun(epochs=2).train(OF_AN_EPOCH["mnist"], range(10, 121, 10)).shown == (120, 200, "1.234")


def test_last_small_batch_of_each_epoch_counts_as_step() -> None:
    run = LineRun(epochs=2)
    for step in range(1, 60, 2):
        batch = (step - 1) % 47
        run.print(f"Train Epoch: {(step - 1) // 47 + 1} [{32 * batch}/1500 (5%)]\tLoss: 1.234", step)
    assert run.shown == (59, 94, "1.234")


def test_bar_that_prints_each_step_twice_keeps_epoch_total_and_loss() -> None:
    run = LineRun(epochs=EPOCHS)
    for step in range(1, 251):
        at = Moment(step)
        # The reader holds a line back until the next one begins.
        run.print(f"Epoch {at.epoch}: {as_bar(at.batch, 100)}, train_loss={step - 1}]", step)
        run.print(f"Epoch {at.epoch}: {as_bar(at.batch, 100)}, train_loss={step}]", min(step + 1, 250))
        run.progress._second = 0
    assert run.shown == (250, 1000, "250")
    assert run.status is not None
    assert (run.status.epoch, run.status.epochs) == (3, 10)


def test_lines_of_a_short_run_that_are_read_at_once_show_step_and_total() -> None:
    run = LineRun()
    run.print("\n".join(f"step {step}/30 loss 0.5" for step in range(1, 11)), 10)
    assert run.shown == (10, 30, "0.5")


@pytest.mark.parametrize("base", [0, 1])
def test_resumed_run_shows_its_true_step_with_the_epoch_of_its_sampler(base: int) -> None:
    run = LineRun(epochs=EPOCHS)
    for step in range(310, 451, 10):
        at = Moment(step)
        run.epoch = Moment(step + 3).epoch + 1  # a line may be read in the next epoch
        run.print(f"Epoch: [{at.epoch + base}]  [ {at.batch}/100]  loss: 1.234", step - 300)
    assert run.shown == (450, 1000, "1.234")


def test_restarted_rank_counts_epochs_as_its_former_process() -> None:
    run = LineRun(epochs=EPOCHS).train(OF_AN_EPOCH["metric logger"], range(10, 151, 10))
    run.progress = run.progress.restarted()
    assert run.train(OF_AN_EPOCH["metric logger"], range(110, 251, 10), resumed=100).shown == (250, 1000, "1.234")


@pytest.mark.parametrize(
    ("lines", "since"),
    [(["loss 0.5", "loss nan", "loss nan"], 9), (["loss nan", "loss 0.5"], None), (["loss 0.5", "loss inf"], 9)],
)
def test_page_has_the_step_since_which_the_loss_is_not_finite(lines: list[str], since: int | None) -> None:
    run = LineRun()
    for step in range(1, 8):
        run.print(f"step {step}/30 loss 0.5", step)
    for number, line in enumerate(lines):
        run.print(f"step {number + 8}/30 {line}", number + 8)
    assert run.progress.build(0).lost_loss_step == since


def test_lost_loss_beside_an_old_step_of_a_bar_has_the_counted_step_of_the_run() -> None:
    run = LineRun(epochs=EPOCHS, first_step=0)
    for step in range(1, 131):
        at = Moment(step)
        shown = at.batch - at.batch % 5  # a bar redraws its numbers less often than the metrics beside them
        run.print(f"Epoch {at.epoch}: {as_bar(shown, 100)}, loss={0.5 if step < 128 else 'nan'}]", step)
        run.progress._second = 0
    assert run.progress.build(0).lost_loss_step == 128


@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("every", [10, 100])
def test_epoch_counts_from_one_in_any_script(base: int, every: int) -> None:
    run = LineRun(epochs=3)
    epochs = []
    for step in range(every, 301, every):
        bar = "" if every == PER_EPOCH else f"{as_bar(Moment(step).batch, PER_EPOCH)}, "
        run.print(f"epoch {Moment(step).epoch + base}: {bar}loss=0.5", step)
        epochs += [run.status.epoch] if run.status else []
    assert epochs == sorted(epochs)
    assert {2, 3} <= set(epochs) <= {1, 2, 3}


@pytest.mark.parametrize(
    ("shape", "full"),
    [
        (
            lambda moment: f"epoch {moment.epoch} iteration {moment.batch - 1}/99 loss 1.0",
            [99, 100, 199, 200],
        ),  # 98 of 99
        (lambda moment: f"epoch {moment.epoch} batch {moment.batch - 1}/100 loss 1.0", [100, 200]),
        (lambda moment: f"Train Epoch: {moment.epoch} [{moment.batch * 8}/800] Loss: 1.0", [100, 200]),
        (lambda moment: f"step {moment.step} loss 1.0", []),
    ],
)
def test_count_is_full_at_the_end_of_an_epoch_only(shape: Format, full: list[int]) -> None:
    run = LineRun()
    seen = []
    for step in range(1, 241):
        run.train(shape, [step])
        seen += [step] if run.progress.build(0).is_count_full else []
    assert seen == full


def test_estimated_total_has_a_margin_and_a_stated_one_has_none() -> None:
    samples = LineRun(epochs=1).train(OF_AN_EPOCH["mnist"], range(10, 61, 10))
    assert samples.progress.build(0).total_margin == 10.0
    exact = LineRun().train(OF_THE_RUN["step of total"], range(10, 61, 10))
    assert exact.progress.build(0).total_margin is None


def test_new_process_is_validated_anew() -> None:
    run = LineRun().train(OF_THE_RUN["step of total"], range(10, 61, 10))
    run.progress = run.progress.restarted()
    run.print("step 10/1000 | loss: 1.0", 10)
    assert run.status is None


def test_uncounted_rank_shows_no_line() -> None:
    progress = LineProgress(lambda: None)
    assert not any(progress.feed(f"step {step}/100 loss 0.5\n".encode(), NOW) for step in range(20))


def test_many_different_lines_take_bounded_memory() -> None:
    run = LineRun()
    for number in range(3000):
        run.print(f"{'x' * (number % 200)} {number} y", number)
        run.progress._second = 0
    assert len(run.progress._finder._streams) <= 128


def test_lines_beyond_the_limit_of_a_second_are_skipped() -> None:
    run = LineRun()
    for step in range(2000):
        run.print("noise", step)
    assert not run.print("step 2000/2000 loss 0.5", 2000)
    assert run.progress._searched > 500


@pytest.mark.parametrize(
    ("line", "metrics"),
    [
        ("step 3 loss: 0.5 (0.6) lr: 1e-3", {"loss": 0.5, "learning_rate": 1e-3}),
        ("{'loss': '1.54', 'learning_rate': '4e-05'}", {"loss": 1.54, "learning_rate": 4e-5}),
        ("step 10: train loss 10.8, val loss 10.9", {"loss": 10.8, "val_loss": 10.9}),
        ("val_acc=91.5 val_loss=0.2", {"val_accuracy": 0.915, "val_loss": 0.2}),
        ("eval_accuracy: 0.91", {"val_accuracy": 0.91}),
        ("loss: nan", {"loss": float("nan")}),
        ("Contrastive_loss: 3.6 (3.6) Caption_loss: 6.4 (6.4) Loss: 10 (9)", {"loss": 10}),
        ("FocalLoss: 1.0, GeoLoss: 9.0, Loss: 10, lr: 1e-5", {"loss": 10, "learning_rate": 1e-5}),
        ("total_loss=10 box_loss=4 cls_loss=6", {"loss": 10}),
        ("box_loss=4 cls_loss=6", {"loss": 4}),
        ("train_loss_step: 2.5 train_loss_epoch: 7.0", {"loss": 2.5}),
        ("glossy 3 closs", {}),
    ],
)
def test_named_numbers_are_metrics(line: str, metrics: dict[str, float]) -> None:
    assert find_metrics(line) == pytest.approx(metrics, nan_ok=True)


@pytest.mark.parametrize(
    ("command", "epochs", "steps"),
    [
        (["train.py", "--epochs", "3"], 3, None),
        (["train.py", "--num_train_epochs=3", "--max_steps=-1"], 3, None),
        (["train.py", "--max_iters=600", "--trainer.max_epochs=4"], 4, 600),
        (["pretrain_gpt.py", "--train-iters", "500000"], None, 500000),
        (["bash", "-c", "cd /work && python train.py --epochs 3 --max_steps=90"], 3, 90),
        (["train.py", "trainer.max_steps=200", "+train.num_epochs=4"], 4, 200),
        (["sh", "-c", "EPOCHS=2 python train.py 'trainer.max_steps=200'"], 2, 200),
        (["train.py", "epochs", "3"], None, None),
        (["train.py", "--epochs"], None, None),
        (["train.py", "--warmup-epochs", "5", "--epochs", "many"], None, None),
    ],
)
def test_options_of_the_command_have_the_length_of_the_run(
    command: list[str], epochs: int | None, steps: int | None
) -> None:
    assert (find_total(command, epochs=True), find_total(command, epochs=False)) == (epochs, steps)
