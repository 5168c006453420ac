"""The lines by which the loops of common projects show their progress; docs/your-script.md lists them."""

import re
from typing import Optional, Sequence

_N = r"[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)"


class Loop:
    """A loop and its lines, the one with the step first.

    ``per_epoch``: its steps begin anew with each epoch. ``needed``: of how many of its lines one was seen before the
    loop counts as recognised.
    """

    def __init__(self, name: str, *patterns: str, per_epoch: bool = True, needed: int = 1) -> None:
        self.name, self.patterns, self.per_epoch, self.needed = name, patterns, per_epoch, needed


# Of two that match the same line the first one stands: what says more comes first.
LOOPS = (
    Loop(
        "Hugging Face Trainer",
        r"^\s*\d+%\|[^|]*\| (?P<step>\d+)/(?P<totalSteps>\d+) \[",
        rf"^\{{'loss': '?(?P<loss>{_N})'?,.*?'learning_rate': '?(?P<learningRate>{_N})'?"
        rf".*?'epoch': '?(?P<epoch>{_N})",
        rf"^\{{'eval_loss': '?(?P<valLoss>{_N})'?(?:.*?'eval_accuracy': '?(?P<valAccuracy>{_N}))?",
        per_epoch=False,
        needed=2,
    ),
    Loop(
        "tqdm with the epoch in front: Lightning and others",
        r"\b[Ee]poch:? ?\[?(?P<epoch>\d+)(?: ?(?:/|of) ?(?P<epochs>\d+))?\]?(?!.*\b(?:val|test|eval)\w*\W)[^%|]*?"
        rf" \d+%\|[^|]*\| (?P<step>\d+)/(?P<totalSteps>\d+) \[(?:.*?loss[\w/]*[=:] ?(?P<loss>{_N}))?",
    ),
    Loop(
        "PyTorch-Ignite",
        r"\bEpoch \[(?P<epoch>\d+)/(?P<epochs>\d+)\]: \[(?P<step>\d+)/(?P<totalSteps>\d+)\] +\d+%\|[^\[]*"
        rf"loss=(?P<loss>{_N})",
    ),
    Loop(
        "torchvision's references and those who took their MetricLogger; pytorch/examples imagenet",
        r"\bEpoch: \[(?P<epoch>\d+)\]\s*\[\s*(?P<step>\d+)/(?P<totalSteps>\d+)\]"
        rf".*?\b[Ll]oss:? (?P<loss>{_N})",
        rf"\bEpoch: \[\d+\]\s*\[.*?\blr: (?P<learningRate>{_N})",
    ),
    Loop(
        "timm",
        r"\bTrain: (?P<epoch>\d+) \[\s*(?P<step>\d+)/(?P<totalSteps>\d+) \(\s*\d+%\)\]\s+"
        rf"Loss: (?P<loss>{_N}).*?, +(?P<samplesPerSecond>{_N})/s .*?\bLR: (?P<learningRate>{_N})",
    ),
    Loop(
        "nanoGPT",
        rf"^iter (?P<step>\d+): loss (?P<loss>{_N}), time ",
        rf"^step \d+: train loss {_N}, val loss (?P<valLoss>{_N})",
        per_epoch=False,
    ),
    Loop(
        "pytorch/examples mnist",
        r"\bTrain Epoch: (?P<epoch>\d+) \[(?P<samples>(?P<step>\d+))/(?P<totalSteps>\d+) \(\s*\d+%\)\]\s+"
        rf"Loss: (?P<loss>{_N})",
    ),
    Loop(
        "pytorch/examples word_language_model",
        r"\| epoch +(?P<epoch>\d+) \| +(?P<step>\d+)/ *(?P<totalSteps>\d+) batches \| "
        rf"lr (?P<learningRate>{_N}) .*?\| loss +(?P<loss>{_N})",
    ),
    Loop(
        "Megatron-LM",
        r"\biteration +(?P<step>\d+)/ *(?P<totalSteps>\d+) \|.*?"
        rf"\blearning rate: (?P<learningRate>{_N}) .*?\blm loss: (?P<loss>{_N})",
        per_epoch=False,
    ),
    Loop(
        "fairseq",
        rf"\| epoch (?P<epoch>\d+): +\d+ / \d+ .*?\bloss=(?P<loss>{_N}), .*?\bnum_updates=(?P<step>\d+), "
        rf"lr=(?P<learningRate>{_N})",
        per_epoch=False,
    ),
    Loop(
        "Keras",
        rf"^\s*(?P<step>\d+)/(?P<totalSteps>\d+) .*?\d+m?s/step - .*?\bloss: (?P<loss>{_N})",
        r"^Epoch (?P<epoch>\d+)/(?P<epochs>\d+)\s*$",
        rf"/step - .*\bval_loss: (?P<valLoss>{_N})",
        needed=2,
    ),
    Loop(
        "Epoch [1/5], Step [100/600], Loss: 0.5",
        r"\b[Ee]poch:? ?\[?(?P<epoch>\d+) ?/ ?(?P<epochs>\d+)\]?\W+(?:[Ss]tep|[Bb]atch|[Ii]ter(?:ation)?):? ?"
        rf"\[?(?P<step>\d+) ?/ ?(?P<totalSteps>\d+)\]?.*?\b[Ll]oss\W{{1,3}}(?P<loss>{_N})",
    ),
    Loop(
        "Epoch 3/10: loss 0.5",
        r"\b[Ee]poch:? ?\[?(?P<step>(?P<epoch>\d+)) ?/ ?(?P<totalSteps>(?P<epochs>\d+))\]?[^|%]*?"
        rf"\b(?<!al )(?<!ion )(?<!est )(?:train(?:ing)?[_ ])?[Ll]oss\W{{1,3}}(?P<loss>{_N})",
        per_epoch=False,
    ),
)
_EPOCHS = re.compile(r"--?(?:\w+\.)*(?:num[-_])?(?:train[-_])?(?:max[-_])?epochs?", re.IGNORECASE)
_STEPS = re.compile(r"--?(?:\w+\.)*(?:max|total|train)[-_]?(?:train[-_])?(?:steps|iters|updates?)", re.IGNORECASE)


def find_total(command: Sequence[str], *, epochs: bool) -> Optional[int]:
    """Return the epochs, or the steps, of the run where an option of the script's command says how many."""
    pattern = _EPOCHS if epochs else _STEPS
    total = None
    for index, word in enumerate(command):
        flag, given, value = word.partition("=")
        value = value if given else "".join(command[index + 1 : index + 2])
        if pattern.fullmatch(flag) and value.isascii() and value.isdigit() and 0 < int(value) < 2**31:
            total = int(value)
    return total
