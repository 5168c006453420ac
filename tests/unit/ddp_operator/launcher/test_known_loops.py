"""Loops that are recognised by their lines, each shown by what the project really writes."""

from __future__ import annotations

import pytest

from ddp_operator.launcher.progress.known_loops import LOOPS, find_total
from ddp_operator.launcher.progress.log_patterns import KnownLoops
from ddp_operator.status.metrics_page import build_progress, parse_page
from tests.support import ROOT

NOW = 1_700_000_000.0

HUGGING_FACE = "\n".join(  # a Trainer of transformers 5.23.0 with logging_steps=2 and eval_strategy="epoch"
    [
        "  0%|          | 0/24 [00:00<?, ?it/s]\r                                      \r"
        "{'loss': '1.54', 'grad_norm': '0.9573', 'learning_rate': '4.792e-05', 'epoch': '0.25'}",
        "\r  8%|▊         | 2/24 [00:00<00:00, 37.40it/s]\r                                              \r"
        "{'loss': '1.632', 'grad_norm': '3.098', 'learning_rate': '3.542e-05', 'epoch': '1'}",
        "\r 33%|███▎      | 8/24 [00:00<00:00, 103.23it/s]",
        "\r  0%|          | 0/8 [00:00<?, ?it/s]\x1b[A\r                                               ",
        "\r                                     \r\x1b[A{'eval_loss': '1.295', 'eval_runtime': '0.0164', "
        "'eval_samples_per_second': '3913', 'eval_steps_per_second': '489.1', 'epoch': '1'}",
        "\r 33%|███▎      | 8/24 [00:00<00:00, 84.72it/s]",
        "\r100%|██████████| 8/8 [00:00<00:00, 512.67it/s]\x1b[A",
        "\r                                              \x1b[A\r 38%|███▊      | 9/24 [00:00<00:00, 86.00it/s]\r",
    ]
)
LIGHTNING = (  # Lightning 2.6.6 without Rich: its bug_report_model.py, two epochs of four batches, the loss in the bar
    "\rTraining: |          | 0/? [00:00<?, ?it/s]\rEpoch 0:   0%|          | 0/4 [00:00<?, ?it/s]"
    "\rEpoch 0:  75%|███████▌  | 3/4 [00:00<00:00,  3.16it/s, v_num=2, train_loss=-2.82]"
    "\rEpoch 0: 100%|██████████| 4/4 [00:01<00:00,  3.62it/s, v_num=2, train_loss=-1.04]"
    "\rValidation: |          | 0/? [00:00<?, ?it/s]\x1b[A\n"
    "\rValidation DataLoader 0: 100%|██████████| 1/1 [00:00<00:00, 573.93it/s]\x1b[A\n"
    "\rEpoch 1:  50%|█████     | 2/4 [00:00<00:00, 12.26it/s, v_num=2, train_loss=-18.7]\r"
    "\rEpoch 1: 100%|██████████| 4/4 [00:00<00:00,  8.71it/s, v_num=2, train_loss=-17.4]\r"
)
METRIC_LOGGER = """\
Epoch: [0]  [ 0/12]  eta: 0:00:00  lr: 0.001000  loss: 0.5000 (0.5000)  time: 0.0133  data: 0.0000
Epoch: [0]  [ 4/12]  eta: 0:00:00  lr: 0.001000  loss: 0.5000 (0.5000)  time: 0.0115  data: 0.0000
Epoch: [0]  [11/12]  eta: 0:00:00  lr: 0.001000  loss: 0.5000 (0.5000)  time: 0.0116  data: 0.0000
Epoch: [0] Total time: 0:00:00 (0.0116 s / it)
Test:  [0/4]  eta: 0:00:00  lr: 0.001000  loss: 0.5000 (0.5000)  time: 0.0101  data: 0.0000
Test: Total time: 0:00:00 (0.0114 s / it)
Epoch: [1]  [ 4/12]  eta: 0:00:00  lr: 0.001000  loss: 0.4800 (0.5000)  time: 0.0109  data: 0.0000
"""  # MetricLogger.log_every as in torchvision's references, here of facebookresearch/deit
IMAGENET = """\
=> creating model 'squeezenet1_1'
Epoch: [0][     1/160146]\tTime  3.289 ( 3.289)\tData  1.215 ( 1.215)\tLoss 6.9024e+00 (6.9024e+00)
Epoch: [0][     2/160146]\tTime  1.839 ( 2.564)\tData  0.076 ( 0.646)\tLoss nan (6.9017e+00)
"""  # pytorch/examples, imagenet/main.py --dummy
TIMM = """\
Train: 0 [   0/10 ( 10%)]  Loss: 0.838 (0.838)  Time: 1.141s,    7.01/s  (1.141s,    7.01/s)  LR: 3.125e-03  \
Data: 0.322 (0.322)
Train: 0 [   9/10 (100%)]  Loss: 0.626 (0.732)  Time: 0.522s,   15.33/s  (0.831s,    9.62/s)  LR: 3.125e-03  \
Data: 0.035 (0.179)
Test: [   0/2]  Time: 0.211 (0.211)  Loss:   0.701 ( 0.701)  Acc@1:  50.000 ( 50.000)  Acc@5: 100.000 (100.000)
Train: 1 [   4/10 ( 50%)]  Loss: 0.833 (0.730)  Time: 0.572s,   13.99/s  (0.681s,   11.74/s)  LR: 1.563e-03  \
Data: 0.016 (0.098)
"""  # timm 1.0's train.py
NANO_GPT = """\
number of parameters: 0.81M
step 0: train loss 10.8592, val loss 10.8241
iter 0: loss 10.8341, time 405.02ms, mfu -100.00%
iter 1: loss 10.8275, time 155.03ms, mfu -100.00%
step 10: train loss 10.8081, val loss 10.8212
saving checkpoint to out
iter 10: loss 10.8324, time 275.05ms, mfu 0.00%
"""  # karpathy/nanoGPT train.py --log_interval=1 --max_iters=20
MNIST = """\
Train Epoch: 1 [0/3000 (0%)]\tLoss: 2.388117
Train Epoch: 1 [2560/3000 (85%)]\tLoss: 2.305797

Test set: Average loss: 2.3058, Accuracy: 50/500 (10%)

Train Epoch: 2 [640/3000 (21%)]\tLoss: 2.309437
"""  # pytorch/examples, mnist/main.py --epochs 2
WORD_MODEL = """\
| epoch   1 |     1/    6 batches | lr 20.00 | ms/batch 337.48 | loss 10.58 | ppl 39429.52
| epoch   1 |     2/    6 batches | lr 20.00 | ms/batch 46.20 | loss  3.48 | ppl    32.53
| end of epoch   1 | time:  0.57s | valid loss  3.12 | valid ppl    22.57
"""  # pytorch/examples, word_language_model/main.py --epochs 2
KERAS = (  # 3.15.1 on torch, model.fit(epochs=2, validation_split=.2), without its backspaces
    "Epoch 1/2\n\r\x1b[1m 1/16\x1b[0m \x1b[32m━\x1b[0m\x1b[37m━━━━━━━━━━━━━━━━━━━\x1b[0m \x1b[1m1s\x1b[0m 73ms/step - "
    "loss: 0.5000\r\x1b[1m16/16\x1b[0m \x1b[32m━━━━━━━━━━━━━━━━━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m0s\x1b[0m 12ms/step - "
    "loss: 0.4000 - val_loss: 0.3000\nEpoch 2/2\n\r\x1b[1m 1/16\x1b[0m \x1b[32m━\x1b[0m\x1b[37m━━━━\x1b[0m "
    "\x1b[1m0s\x1b[0m 2ms/step - loss: 0.2500\r"
)
MEGATRON = """\
 iteration      122/  250000 | consumed samples:       124928 | elapsed time per iteration (ms): 86545.2 | \
learning rate: 9.150E-06 | global batch size:  1024 | lm loss: 2.504220E+00 | loss scale: 1.0 | grad norm: 0.231 |
 iteration      123/  250000 | consumed samples:       125952 | elapsed time per iteration (ms): 87871.6 | \
learning rate: 9.225E-06 | global batch size:  1024 | lm loss: 2.493043E+00 | loss scale: 1.0 | grad norm: 0.236 |
"""  # epfLLM/Megatron-LLM, issue 11
FAIRSEQ = """\
2020-07-17 07:11:02 | INFO | train_inner | epoch 001:   2800 / 160368 loss=9.255, ppl=611.12, wps=57.3, ups=0.04, \
wpb=1613, bsz=80, num_updates=2800, lr=2.8e-05, gnorm=3.23, train_wall=13, wall=1236
2020-07-17 07:11:31 | INFO | train_inner | epoch 001:   2900 / 160368 loss=8.979, ppl=504.73, wps=53.5, ups=0.04, \
wpb=1504, bsz=64, num_updates=2900, lr=2.9e-05, gnorm=2.39, train_wall=13, wall=1265
"""  # facebookresearch/fairseq, issue 2338
IGNITE = """\
Epoch [1/8]: [1/29]   3%|▎          [00:00<?]\rEpoch [1/8]: [1/29]   3%|▎         , loss=2.31 [00:00<?]
Epoch [1/8]: [28/29]  97%|█████████▋, loss=2.04 [00:00<00:00]Epoch[1] loss 2.0393 acc 0.5495
Epoch [2/8]: [25/29]  86%|████████▌ , loss=2.07 [00:00<00:00]
"""
TUTORIAL = "Epoch [1/5], Step [100/600], Loss: 2.2165\nEpoch [2/5], Step [200/600], Loss: 1.1008\n"
EPOCHS = "epoch 3/20: loss 0.6610\nepoch 4/20: val loss 0.7, acc 0.5\nepoch 4/20: loss 0.5310\n"


def read(text: str, epochs: int | None = None, steps: int | None = None) -> KnownLoops:
    seen = KnownLoops(epochs, steps)
    for line in text.splitlines(keepends=True):
        seen.feed(line.encode(), NOW)
    return seen


def figures(text: str, epochs: int | None = None, steps: int | None = None) -> tuple[object, ...]:
    status = build_progress(parse_page(read(text, epochs, steps).page(0)).values)
    assert status is not None
    return status.epoch, status.epochs, status.step, status.total_steps, status.loss


@pytest.mark.parametrize(
    ("text", "epochs", "steps", "expected"),
    [
        (HUGGING_FACE, None, None, (1, None, 9, 24, "1.632")),
        (LIGHTNING, 2, None, (1, 2, 8, 8, "-17.4")),
        (METRIC_LOGGER, 2, None, (1, 2, 16, 24, "0.48")),
        (METRIC_LOGGER, None, None, (1, None, 16, None, "0.48")),
        (IMAGENET, 90, None, (0, 90, 2, 160146 * 90, "nan")),
        (TIMM, 2, None, (1, 2, 14, 20, "0.833")),
        (NANO_GPT, None, 20, (None, None, 10, 20, "10.83")),
        (MNIST, 2, None, (2, 2, 3640, 6000, "2.309")),
        (WORD_MODEL, 2, None, (1, 2, 2, 12, "3.48")),
        (KERAS, None, None, (2, 2, 17, 32, "0.25")),
        (MEGATRON, None, None, (None, None, 123, 250000, "2.493")),
        (FAIRSEQ, None, 50000, (1, None, 2900, 50000, "8.979")),
        (IGNITE, None, None, (2, 8, 54, 232, "2.07")),
        (TUTORIAL, None, None, (2, 5, 800, 3000, "1.101")),
        (EPOCHS, None, None, (4, 20, 4, 20, "0.531")),
    ],
    ids=[
        "hugging-face", "lightning", "metric-logger", "epochs-unknown", "imagenet", "timm", "nanogpt", "mnist",
        "word-model", "keras", "megatron", "fairseq", "ignite", "tutorial", "epochs-alone",
    ],
)  # fmt: skip
def test_what_a_loop_writes_is_its_progress(
    text: str, epochs: int | None, steps: int | None, expected: tuple[object, ...]
) -> None:
    assert figures(text, epochs, steps) == expected


def test_samples_that_begin_anew_with_an_epoch_are_counted_on() -> None:
    assert parse_page(read(MNIST).page(0)).values["ddp_samples_total"] == 2560 + 640


def test_a_validation_shows_its_loss_but_no_steps_of_its_own() -> None:
    status = build_progress(parse_page(read(HUGGING_FACE).page(0)).values)
    assert status is not None
    assert (status.val_loss, status.step) == ("1.295", 9)
    assert build_progress(parse_page(read(NANO_GPT).page(0)).values).val_loss == "10.82"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("bar", "expected"),
    [
        ("8/8", (9, 24)),
        ("1/30", (9, 24)),
        ("10/24", (10, 24)),
        ("24/24\r1/30", (1, 30)),  # another run of the same script
        ("24/24\r1/8", (24, 24)),
        ("25/24", (9, 24)),
    ],
)
def test_of_several_bars_the_runs_own_is_read(bar: str, expected: tuple[int, int]) -> None:
    seen = read(HUGGING_FACE)
    for one in bar.split("\r"):
        taken = seen.feed(f"\r 38%|███▊      | {one} [00:00<00:00, 86.00it/s]\r".encode(), NOW)
    status = build_progress(parse_page(seen.page(0)).values)
    assert status is not None
    assert (status.step, status.total_steps) == expected
    assert taken == (bar.rpartition("\r")[2] == f"{expected[0]}/{expected[1]}")


@pytest.mark.parametrize(
    "text",
    [
        "Downloading: 100%|██████████| 3/3 [00:01<00:00,  2.9it/s]\nMap:  50%|█████     | 32/64 [00:00<00:00, 9it/s]\n",
        "  0%|          | 0/8 [00:00<?, ?it/s]\r 50%|█████     | 4/8 [00:00<00:00, 9it/s]\r100%|█████| 8/8 [00:01]\r",
        "loaded 3/10 shards\nloss 0.5\nstep 3\nepoch 1\nBatch 3 of 10\nLoss: 2\n",
        "Epoch: [0]  [ 4/12]  eta: 0:00:00  lr: 0.001000  loss: 0.5000 (0.5000)\n" * 3,  # it stands still
        "Epoch 3 [val]:  10%|█         | 1/10 [00:00<00:01, loss=0.5]\nEpoch 3 [val]:  20%|██        | 2/10 [00:00<]\n",
        "INFO epoch 1/20: checkpoint saved\nINFO epoch 2/20: checkpoint saved, 3 files\n",
    ],
)
def test_ordinary_lines_are_no_progress(text: str) -> None:
    seen = KnownLoops(10, 1000)
    assert not any(seen.feed(line.encode(), NOW) for line in text.splitlines(keepends=True))


def test_a_new_process_of_a_recognised_loop_is_read_from_its_first_line() -> None:
    again = read(TIMM, 2).restarted()
    assert again.feed(TIMM.splitlines(keepends=True)[0].encode(), NOW)
    assert parse_page(again.page(0)).values["ddp_steps_total"] == 1


def test_every_loop_is_in_the_docs() -> None:
    rows = [line.split(" | ")[0] for line in (ROOT / "docs" / "your-script.md").read_text().splitlines()]
    assert [row.removeprefix("| ") for row in rows if row.startswith("| ")][1:] == [loop.name for loop in LOOPS]


@pytest.mark.parametrize(
    ("command", "epochs", "steps"),
    [
        (["train.py", "--epochs", "3"], 3, None),
        (["train.py", "--num_train_epochs=3", "--max_steps=-1"], 3, None),
        (["train.py", "--max_iters=600", "--trainer.max_epochs=4"], 4, 600),
        (["pretrain_gpt.py", "--train-iters", "500000"], None, 500000),
        (["train.py", "--epochs"], None, None),
        (["train.py", "--warmup-epochs", "5", "--epochs", "many"], None, None),
    ],
)
def test_the_command_may_say_how_long_the_run_is(command: list[str], epochs: int | None, steps: int | None) -> None:
    assert (find_total(command, epochs=True), find_total(command, epochs=False)) == (epochs, steps)
