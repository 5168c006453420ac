"""What the network is trained for: the loss of a batch and the totals that make up a validation.

Totals are sums, so that summing them over ranks and dividing once at the end counts every sample exactly once.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ddp_trainer.data.arrays import VOID, Datasets
from ddp_trainer.errors import require


@dataclass(frozen=True)
class Classification:
    """One class an image: cross-entropy and the share of images whose largest logit is the label's.

    ``score`` names the one among :meth:`scores` by which runs are compared: greater is better, at most 1.
    ``num_totals`` is the length of the totals, which a rank without validation samples must know too.
    """

    label_smoothing: float = 0.0
    num_classes: int = 0
    score: ClassVar[str] = "accuracy"
    num_totals: ClassVar[int] = 3  # loss, right answers, samples

    def check(self, outputs: object, targets: Tensor) -> None:
        """Raise :class:`UserError` unless outputs are logits (B, K) with at least the data's number of classes."""
        _check_shape(outputs, (len(targets),), self.num_classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of logits (B, K) and classes (B,)."""
        return cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Images whose largest logit is the label's, and images: float32 (2,) on the outputs' device."""
        right = (outputs.detach().argmax(dim=1) == targets).sum().float()
        return torch.stack([right, torch.full_like(right, len(targets))])

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross-entropy without smoothing, number of right answers, number of samples: float64."""
        outputs = outputs.float()
        loss = cross_entropy(outputs, targets, reduction="sum")
        correct = (outputs.argmax(dim=1) == targets).sum()
        return torch.stack([loss.double(), correct.double(), torch.full_like(loss, len(targets), dtype=torch.float64)])

    def scores(self, totals: list[float]) -> dict[str, float]:
        """Mean loss and accuracy over all samples."""
        loss, correct, count = totals
        return {"loss": loss / count, "accuracy": correct / count}


@dataclass(frozen=True)
class Segmentation:
    """One class a pixel, some pixels void: cross-entropy, and the mean intersection over union of the classes.

    With C[t, p] the number of pixels of class t that were taken for p, over all images and ranks, a class's
    intersection over union is C[k, k] / (sum_p C[k, p] + sum_t C[t, k] - C[k, k]); the mean is over the classes that
    are met in the labels or the answers (Everingham et al., "The Pascal Visual Object Classes Challenge", 2015).
    """

    num_classes: int
    label_smoothing: float = 0.0
    score: ClassVar[str] = "mean_iou"

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
        loss = cross_entropy(outputs, targets, ignore_index=VOID, label_smoothing=self.label_smoothing, reduction="sum")
        return loss / (targets != VOID).sum().clamp(min=1)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Pixels whose largest logit is the label's, and pixels that are not void."""
        right = (outputs.detach().argmax(dim=1) == targets).sum()
        return torch.stack([right, (targets != VOID).sum()]).float()

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


Task = Classification | Segmentation


def build_task(datasets: Datasets, label_smoothing: float) -> Task:
    """The kind of problem that ``datasets`` pose."""
    if datasets.train.masks:
        return Segmentation(datasets.num_classes, label_smoothing)
    return Classification(label_smoothing, datasets.num_classes)


def _check_shape(outputs: object, rest: tuple[int, ...], num_classes: int) -> None:
    expected = (rest[0], f"{num_classes} or more", *rest[1:])
    wanted = f"return logits of shape ({', '.join(map(str, expected))}{',' if len(expected) == 1 else ''})"
    require(isinstance(outputs, Tensor), "model.name", f"the model returned {type(outputs).__name__}", wanted)
    assert isinstance(outputs, Tensor)
    shape = tuple(outputs.shape)
    fits = len(shape) == len(rest) + 1 and (shape[0], *shape[2:]) == rest and shape[1] >= num_classes
    require(fits, "model.name", f"the model returned logits of shape {shape}", wanted)
