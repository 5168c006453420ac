"""Tasks: the loss of a batch, and the metrics of a validation.

A metric is a pair of sums, added over batches and ranks and divided once at the end: every sample counts exactly once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from ddp_sdk.errors import UserError, require
from ddp_trainer.data.arrays import VOID, Datasets, count_samples
from ddp_trainer.imports import load_callable

# torch's label of elements without a class, such as padding: neither the loss nor the metrics count them.
IGNORED = -100

# Name of a metric -> its sum over a batch, and the number of elements summed: numbers, or tensors of one number.
Metrics = Mapping[str, tuple[Tensor | float, Tensor | float]]


class Task:
    """The objective of a training. Subclass it with :meth:`loss`, and with :meth:`metrics` for more than the loss.

    ``output`` is the model's output for a batch, ``target`` the data's target; both are on the device. ``score`` names
    the metric by which validations are compared, ``greater_is_better`` its direction.
    """

    score: ClassVar[str] = "loss"
    greater_is_better: ClassVar[bool] = False

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the mean loss of the batch: a scalar with a gradient."""
        raise NotImplementedError

    def count_elements(self, target: Any) -> Tensor | None:
        """Return the number of elements that :meth:`loss` averages, if it differs between batches of one size.

        Examples are pixels that are not void, or tokens that are not padding. A step weights each part of its batch and
        each rank by it, so that the gradient is that of the mean over all elements of the step. None weights by
        samples. For a number of zero, the loss must be zero.
        """
        return None

    def metrics(self, output: Any, target: Any) -> Metrics:
        """Return for each metric its sum over the batch and the number of elements summed, such as samples or tokens.

        Both are added over batches and ranks before the division. Unless "loss" is among them, it is :meth:`loss` over
        the samples. The names must be the same for every batch.
        """
        return {}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Compute the reported values from the metrics' means over all validation data; by default the means.

        Override it for values that are not means, such as the root of a mean square or a perplexity.
        """
        return means

    def tokens(self, inputs: Any) -> int:
        """Return the tokens of a batch of ``inputs`` if throughput is reported in tokens, otherwise 0."""
        return 0

    def correct(self, output: Any, target: Any) -> Tensor:
        """Return the numbers of correct answers and of answers, float32 (2,) on the outputs' device.

        Only ``--train-accuracy`` needs it.
        """
        raise NotImplementedError

    def check(self, output: Any, target: Any) -> None:
        """Raise :class:`UserError` if the output does not have the form that the loss needs."""

    def totals(self, output: Any, target: Any) -> Tensor:
        """Return sum and count of each metric, float64, to be added over batches and ranks.

        Raises :class:`UserError` if the metrics are malformed.
        """
        metrics: dict[str, Any] = dict(self.metrics(output, target))
        if "loss" not in metrics:
            elements = self.count_elements(target)
            count = count_samples(target) if elements is None else elements
            metrics = {"loss": (self.loss(output, target) * count, count), **metrics}
        names: list[str] = self.__dict__.setdefault("_names", list(metrics))
        require(
            names == list(metrics),
            "task.metrics",
            f"names changed from {', '.join(names)} to {', '.join(metrics)}",
            "return the same names for every batch",
        )
        device = next((part.device for part in tree_leaves(output) if isinstance(part, Tensor)), torch.device("cpu"))
        sums = []
        for name, pair in metrics.items():
            is_pair = isinstance(pair, tuple) and len(pair) == 2
            require(is_pair, "task.metrics", f"{name!r} is {_form(pair)}", "return (sum, count) for each metric")
            sums += [_sum(name, part, device) for part in pair]
        return torch.stack(sums)

    @property
    def num_totals(self) -> int:
        """Return the length of the totals, which a rank without validation samples needs too."""
        return 2 * len(self.__dict__["_names"])

    def scores(self, totals: list[float]) -> dict[str, float]:
        """Compute the reported values of a validation from the totals of all ranks."""
        names: tuple[str, ...] = self.__dict__["_names"]
        pairs = zip(names, totals[::2], totals[1::2], strict=True)
        return self.summarize({name: total / count if count else math.nan for name, total, count in pairs})


@dataclass(frozen=True)
class Classification(Task):
    """One class per input: cross-entropy, and the share of inputs whose largest logit is the label's.

    Inputs with the label -100 are not counted. ``complete`` states that no label is -100: ranks then need not exchange
    the number of labels in every step.
    """

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
            return cross_entropy(output, target)
        return _mean_cross_entropy(output, target)

    def count_elements(self, target: Tensor) -> Tensor | None:
        """Return the number of inputs with a class."""
        return None if self.complete else _count_labels(target)

    def correct(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the numbers of inputs whose largest logit is the label's, and of inputs with a class: float32 (2,)."""
        right = (output.detach().argmax(dim=1) == target).sum()
        return torch.stack([right, _count_labels(target)]).float()

    def metrics(self, output: Tensor, target: Tensor) -> Metrics:
        """Return the cross-entropy and the accuracy."""
        output = output.float()
        count = _count_labels(target)
        loss = cross_entropy(output, target, reduction="sum")
        return {"loss": (loss, count), "accuracy": ((output.argmax(dim=1) == target).sum(), count)}


class LanguageModel(Task):
    """Next-token prediction: cross-entropy of logits (B, T, K) with tokens (B, T), and the share predicted correctly.

    Tokens of -100, such as padding, are not counted.
    """

    score: ClassVar[str] = "accuracy"
    greater_is_better: ClassVar[bool] = True

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy over all tokens, in nats."""
        return _mean_cross_entropy(output.flatten(0, 1), target.flatten())

    def count_elements(self, target: Tensor) -> Tensor:
        """Return the number of tokens that are not -100."""
        return _count_labels(target)

    def tokens(self, inputs: Tensor) -> int:
        """Return the number of elements of ``inputs``."""
        return inputs.numel()

    def correct(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the numbers of tokens whose largest logit is the target's, and of tokens."""
        right = (output.detach().argmax(dim=2) == target).sum()
        return torch.stack([right, _count_labels(target)]).float()

    def metrics(self, output: Tensor, target: Tensor) -> Metrics:
        """Return cross-entropy and accuracy per token."""
        count = _count_labels(target)
        right = (output.argmax(dim=2) == target).sum()
        loss = cross_entropy(output.float().flatten(0, 1), target.flatten(), reduction="sum")
        return {"loss": (loss, count), "accuracy": (right, count)}


@dataclass(frozen=True)
class Segmentation(Task):
    """One class per pixel, some pixels void: cross-entropy, and the mean intersection over union of the classes.

    With C[t, p] the number of pixels of class t predicted as p, over all images and ranks, a class's intersection over
    union is C[k, k] / (sum_p C[k, p] + sum_t C[t, k] - C[k, k]). The mean is over the classes that occur in the labels
    or the predictions (Everingham et al., "The Pascal Visual Object Classes Challenge", 2015).
    """

    num_classes: int
    score: ClassVar[str] = "mean_iou"
    greater_is_better: ClassVar[bool] = True

    @property
    def num_totals(self) -> int:
        return 1 + self.num_classes**2

    def check(self, outputs: object, targets: Tensor) -> None:
        """Raise :class:`UserError` unless outputs are logits (B, K, H, W) of the masks' size."""
        _check_shape(outputs, tuple(targets.shape), self.num_classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of logits (B, K, H, W) and classes (B, H, W) over the pixels that are not void.

        Zero if all pixels are void.
        """
        return _mean_cross_entropy(outputs, targets, ignored=VOID)

    def count_elements(self, target: Tensor) -> Tensor:
        """Return the number of pixels that are not void."""
        return _count_labels(target, VOID)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the numbers of pixels whose largest logit is the label's, and of pixels that are not void."""
        right = (outputs.detach().argmax(dim=1) == targets).sum()
        return torch.stack([right, _count_labels(targets, VOID)]).float()

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropy, then the confusion matrix, without void pixels."""
        outputs = outputs.float()
        classes = self.num_classes
        loss = cross_entropy(outputs, targets, ignore_index=VOID, reduction="sum")
        # A model may have more outputs than the data has classes; those outputs are not predictions.
        predictions = outputs[:, :classes].argmax(dim=1)
        pairs = torch.where(targets == VOID, classes * classes, targets * classes + predictions)
        counts = torch.bincount(pairs.flatten(), minlength=classes * classes + 1)[:-1]
        return torch.cat([loss.double().view(1), counts.double()])

    def scores(self, totals: list[float]) -> dict[str, float]:
        """Compute mean loss and accuracy over all pixels that are not void, and the mean intersection over union."""
        matrix = torch.tensor(totals[1:], dtype=torch.float64).view(self.num_classes, self.num_classes)
        pixels = float(matrix.sum().clamp(min=1.0))
        intersection = matrix.diagonal()
        union = matrix.sum(0) + matrix.sum(1) - intersection
        occurs = union > 0
        mean_iou = float((intersection[occurs] / union[occurs]).mean()) if bool(occurs.any()) else 0.0
        return {"loss": totals[0] / pixels, "accuracy": float(intersection.sum()) / pixels, "mean_iou": mean_iou}


def build_task(datasets: Datasets, name: str | None = None) -> Task:
    """Build the task ``name``, a user's ``module:Class``, or without a name the task that fits the labels.

    Raises :class:`UserError` if it is not a :class:`Task`, or if without a name the data have no classes.
    """
    if name is not None:
        task = load_callable(name, "task")()
        if not isinstance(task, Task):
            raise UserError("task", f"{name} returned {type(task).__name__}", "subclass ddp_trainer.Task")
        return task
    require(
        datasets.num_classes > 0,
        "task",
        "no task is named, and the data have no num_classes",
        "give a task, or Datasets(…, num_classes=…) for classification",
    )
    if datasets.masks:
        return Segmentation(datasets.num_classes)
    # Labels of images that the trainer holds have been checked: none is -100.
    return Classification(datasets.num_classes, complete=datasets.holds_images)


def _count_labels(targets: Tensor, ignored: int = IGNORED) -> Tensor:
    return (targets != ignored).sum()


def _mean_cross_entropy(outputs: Tensor, targets: Tensor, *, ignored: int = IGNORED) -> Tensor:
    """Compute the mean cross-entropy over the targets that are not ``ignored``; zero, not NaN, if all are."""
    total = cross_entropy(outputs, targets, ignore_index=ignored, reduction="sum")
    return total / _count_labels(targets, ignored).clamp(min=1)


def _check_shape(outputs: object, rest: tuple[int, ...], num_classes: int) -> None:
    """Raise :class:`UserError` unless ``outputs`` are logits (B, K, ...) of enough classes; ``rest`` is (B, ...)."""
    expected = (rest[0], f"{num_classes} or more", *rest[1:])
    remedy = f"return logits of shape ({', '.join(map(str, expected))})"
    require(isinstance(outputs, Tensor), "model.name", f"the model returned {type(outputs).__name__}", remedy)
    assert isinstance(outputs, Tensor)
    shape = tuple(outputs.shape)
    fits = len(shape) == len(rest) + 1 and (shape[0], *shape[2:]) == rest and shape[1] >= num_classes
    require(fits, "model.name", f"the model returned logits of shape {shape}", remedy)


def _sum(name: str, value: object, device: torch.device) -> Tensor:
    """Convert a part of a metric to float64 () on ``device``; numbers are created there, because a copy would wait."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).double()
    require(
        isinstance(value, int | float),
        "task.metrics",
        f"{name!r} contains {_form(value)}",
        "return (sum, count) for each, numbers or tensors of one number",
    )
    return torch.full((), value, dtype=torch.float64, device=device)  # type: ignore[call-overload,no-any-return]


def _form(value: object) -> str:
    """Describe ``value`` for a message."""
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
