"""What the network is trained for: the loss of a batch and the totals that make up a validation.

Totals are sums, so that summing them over ranks and dividing once at the end counts every sample exactly once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from ddp_trainer.data.arrays import VOID, Datasets, count_samples
from ddp_trainer.errors import UserError, require
from ddp_trainer.imports import load_callable

# torch's label of what has no class, such as padding: it counts neither in the loss nor in the scores.
IGNORED = -100

# For each metric its sum over a batch, and the number of things summed: numbers, or tensors of one number.
Metrics = Mapping[str, tuple[Tensor | float, Tensor | float]]


class Task:
    """What is learnt: subclass it, with :meth:`loss`, and :meth:`metrics` where the loss alone says too little.

    ``output`` is what the model has returned for a batch, ``target`` what the data say that it should have; both are on
    the device. ``score`` names the metric by which validations are compared, and whether it is better when greater.
    """

    score: ClassVar[str] = "loss"
    greater_is_better: ClassVar[bool] = False

    def loss(self, output: Any, target: Any) -> Tensor:
        """The mean loss of the batch's samples: one floating-point number that depends on the parameters."""
        raise NotImplementedError

    def count_elements(self, target: Any) -> Tensor | None:
        """The number of elements that :meth:`loss` is the mean of, where it differs between batches of one size.

        Examples are pixels that are not void, or tokens that are not padding. A step weights each part of its batch and
        each rank by it, so that the gradient is that of the mean over all elements of the step. None: weight by
        samples. Where the number is zero the loss must be zero, not the mean of nothing.
        """
        return None

    def metrics(self, output: Any, target: Any) -> Metrics:
        """For each metric its sum over the batch, and the number of things summed, such as samples or tokens.

        Both are added up over batches and ranks before the one is divided by the other. "loss" is :meth:`loss` over
        the samples unless it is given here. The names must be the same for every batch.
        """
        return {}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """What is reported, from the metrics' means over all validation data: they themselves, unless overridden.

        Here belongs what is no mean of parts, such as the root of a mean square or a perplexity.
        """
        return means

    def tokens(self, inputs: Any) -> int:
        """Tokens of a batch of ``inputs``, where throughput is told in tokens, and not in samples; else 0."""
        return 0

    def correct(self, output: Any, target: Any) -> Tensor:
        """Right answers and answers, float32 (2,) on the outputs' device, for ``--train-accuracy``; may be left out."""
        raise NotImplementedError

    def check(self, output: Any, target: Any) -> None:
        """Raise :class:`UserError` where the output has not the form that the loss needs."""

    def totals(self, output: Any, target: Any) -> Tensor:
        """Sum and count of each metric, float64: what is added up over batches and ranks.

        Raises :class:`UserError` where the metrics are not what they should be.
        """
        found: dict[str, Any] = dict(self.metrics(output, target))
        if "loss" not in found:
            elements = self.count_elements(target)
            count = count_samples(target) if elements is None else elements
            found = {"loss": (self.loss(output, target) * count, count), **found}
        names: list[str] = self.__dict__.setdefault("_names", list(found))
        require(
            names == list(found),
            "task.metrics",
            f"has {', '.join(found)} now and had {', '.join(names)} before",
            "return the same names for every batch",
        )
        device = next((part.device for part in tree_leaves(output) if isinstance(part, Tensor)), torch.device("cpu"))
        sums = []
        for name, pair in found.items():
            fits = isinstance(pair, tuple) and len(pair) == 2
            require(fits, "task.metrics", f"{name!r} is {_form(pair)}", "return (sum, count) for each metric")
            sums += [_sum(name, part, device) for part in pair]
        return torch.stack(sums)

    @property
    def num_totals(self) -> int:
        """The length of the totals, which a rank without validation samples must know too."""
        return 2 * len(self.__dict__["_names"])

    def scores(self, totals: list[float]) -> dict[str, float]:
        """What is reported of a validation, from the totals of all ranks."""
        names: tuple[str, ...] = self.__dict__["_names"]
        pairs = zip(names, totals[::2], totals[1::2], strict=True)
        return self.summarize({name: total / count if count else math.nan for name, total, count in pairs})


@dataclass(frozen=True)
class Classification(Task):
    """One class an input: cross-entropy and the share of inputs whose largest logit is the label's.

    Inputs with the label -100 count for nothing. ``complete`` states that there are none, so that ranks need not
    exchange the number of labels in every step.
    """

    label_smoothing: float = 0.0
    num_classes: int = 0
    complete: bool = field(default=False, compare=False)
    score: ClassVar[str] = "accuracy"
    greater_is_better: ClassVar[bool] = True

    def check(self, output: object, target: Tensor) -> None:
        """Raise :class:`UserError` unless outputs are logits (B, K) with at least the data's number of classes."""
        _check_shape(output, (len(target),), self.num_classes)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy of logits (B, K) and classes (B,) over the inputs with a class."""
        if self.complete:
            return cross_entropy(output, target, label_smoothing=self.label_smoothing)
        return _mean_cross_entropy(output, target, label_smoothing=self.label_smoothing)

    def count_elements(self, target: Tensor) -> Tensor | None:
        """Inputs with a class."""
        return None if self.complete else _count_labels(target)

    def correct(self, output: Tensor, target: Tensor) -> Tensor:
        """Inputs whose largest logit is the label's, and inputs with a class: float32 (2,) on the outputs' device."""
        right = (output.detach().argmax(dim=1) == target).sum()
        return torch.stack([right, _count_labels(target)]).float()

    def metrics(self, output: Tensor, target: Tensor) -> Metrics:
        """The cross-entropy without smoothing, and right answers."""
        output = output.float()
        count = _count_labels(target)
        loss = cross_entropy(output, target, reduction="sum")
        return {"loss": (loss, count), "accuracy": ((output.argmax(dim=1) == target).sum(), count)}


class LanguageModel(Task):
    """The token after each: cross-entropy of logits (B, T, K) with tokens (B, T), and the share that is right.

    Tokens of -100, such as padding, count for nothing.
    """

    score: ClassVar[str] = "accuracy"
    greater_is_better: ClassVar[bool] = True

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy over all tokens, in nats."""
        return _mean_cross_entropy(output.flatten(0, 1), target.flatten())

    def count_elements(self, target: Tensor) -> Tensor:
        """Tokens that are not -100."""
        return _count_labels(target)

    def tokens(self, inputs: Tensor) -> int:
        """All of them."""
        return inputs.numel()

    def correct(self, output: Tensor, target: Tensor) -> Tensor:
        """Tokens whose largest logit is the next one's, and tokens."""
        right = (output.detach().argmax(dim=2) == target).sum()
        return torch.stack([right, _count_labels(target)]).float()

    def metrics(self, output: Tensor, target: Tensor) -> Metrics:
        """Cross-entropy and right answers, by the token."""
        count = _count_labels(target)
        right = (output.argmax(dim=2) == target).sum()
        loss = cross_entropy(output.float().flatten(0, 1), target.flatten(), reduction="sum")
        return {"loss": (loss, count), "accuracy": (right, count)}


@dataclass(frozen=True)
class Segmentation(Task):
    """One class a pixel, some pixels void: cross-entropy, and the mean intersection over union of the classes.

    With C[t, p] the number of pixels of class t that were taken for p, over all images and ranks, a class's
    intersection over union is C[k, k] / (sum_p C[k, p] + sum_t C[t, k] - C[k, k]); the mean is over the classes that
    are met in the labels or the answers (Everingham et al., "The Pascal Visual Object Classes Challenge", 2015).
    """

    num_classes: int
    label_smoothing: float = 0.0
    score: ClassVar[str] = "mean_iou"
    greater_is_better: ClassVar[bool] = True

    @property
    def num_totals(self) -> int:
        """Loss, and the confusion matrix row by row."""
        return 1 + self.num_classes**2

    def check(self, outputs: object, targets: Tensor) -> None:
        """Raise :class:`UserError` unless outputs are logits (B, K, H, W) of the masks' size."""
        _check_shape(outputs, tuple(targets.shape), self.num_classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of logits (B, K, H, W) and classes (B, H, W) over the pixels that are not void.

        Zero where all are void, instead of the mean of nothing.
        """
        return _mean_cross_entropy(outputs, targets, ignored=VOID, label_smoothing=self.label_smoothing)

    def count_elements(self, target: Tensor) -> Tensor:
        """Pixels that are not void."""
        return _count_labels(target, VOID)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Pixels whose largest logit is the label's, and pixels that are not void."""
        right = (outputs.detach().argmax(dim=1) == targets).sum()
        return torch.stack([right, _count_labels(targets, VOID)]).float()

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross-entropy without smoothing, then the confusion matrix; void pixels are in neither."""
        outputs, kinds = outputs.float(), self.num_classes
        loss = cross_entropy(outputs, targets, ignore_index=VOID, reduction="sum")
        # An answer beyond the data's classes, of a model with more outputs, is wrong whatever its number is.
        answers = outputs[:, :kinds].argmax(dim=1)
        pairs = torch.where(targets == VOID, kinds * kinds, targets * kinds + answers)
        counts = torch.bincount(pairs.flatten(), minlength=kinds * kinds + 1)[:-1]
        return torch.cat([loss.double().view(1), counts.double()])

    def scores(self, totals: list[float]) -> dict[str, float]:
        """Mean loss and accuracy over all pixels that are not void, and the mean intersection over union."""
        matrix = torch.tensor(totals[1:], dtype=torch.float64).view(self.num_classes, self.num_classes)
        pixels = float(matrix.sum().clamp(min=1.0))
        both = matrix.diagonal()
        either = matrix.sum(0) + matrix.sum(1) - both
        met = either > 0
        mean_iou = float((both[met] / either[met]).mean()) if bool(met.any()) else 0.0
        return {"loss": totals[0] / pixels, "accuracy": float(both.sum()) / pixels, "mean_iou": mean_iou}


def build_task(datasets: Datasets, label_smoothing: float, name: str | None = None) -> Task:
    """The task ``name``, a user's ``module:Class``, or that which ``datasets`` pose where there is none.

    Raises :class:`UserError` where it is not a :class:`Task`, and where the data pose none.
    """
    if name is not None:
        task = load_callable(name, "task")()
        if not isinstance(task, Task):
            raise UserError("task", f"{name} gave {type(task).__name__}", "subclass ddp_trainer.Task")
        return task
    require(
        datasets.num_classes > 0,
        "task",
        "what is to be learnt from these data is not known",
        "give a task, or Datasets(…, num_classes=…) for classification",
    )
    if datasets.masks:
        return Segmentation(datasets.num_classes, label_smoothing)
    # The labels of images that the trainer holds are checked against the classes.
    return Classification(label_smoothing, datasets.num_classes, complete=datasets.holds_images)


def _count_labels(targets: Tensor, ignored: int = IGNORED) -> Tensor:
    return (targets != ignored).sum()


def _mean_cross_entropy(
    outputs: Tensor, targets: Tensor, *, ignored: int = IGNORED, label_smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy over the targets that are not ``ignored``; zero where all are, instead of not a number."""
    total = cross_entropy(outputs, targets, ignore_index=ignored, label_smoothing=label_smoothing, reduction="sum")
    return total / _count_labels(targets, ignored).clamp(min=1)


def _check_shape(outputs: object, rest: tuple[int, ...], num_classes: int) -> None:
    expected = (rest[0], f"{num_classes} or more", *rest[1:])
    wanted = f"return logits of shape ({', '.join(map(str, expected))}{',' if len(expected) == 1 else ''})"
    require(isinstance(outputs, Tensor), "model.name", f"the model returned {type(outputs).__name__}", wanted)
    assert isinstance(outputs, Tensor)
    shape = tuple(outputs.shape)
    fits = len(shape) == len(rest) + 1 and (shape[0], *shape[2:]) == rest and shape[1] >= num_classes
    require(fits, "model.name", f"the model returned logits of shape {shape}", wanted)


def _sum(name: str, value: object, device: torch.device) -> Tensor:
    """A part of a metric, float64 (), on ``device``; numbers are made there, for a copy would wait for it."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).double()
    require(
        isinstance(value, int | float),
        "task.metrics",
        f"{name!r} has {_form(value)} in it",
        "return (sum, count) for each, numbers or tensors of one number",
    )
    return torch.full((), value, dtype=torch.float64, device=device)  # type: ignore[call-overload,no-any-return]


def _form(value: object) -> str:
    """What ``value`` is, for a message."""
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
