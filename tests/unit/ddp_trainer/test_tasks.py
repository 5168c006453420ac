"""Losses and scores, against scikit-learn and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddp_sdk.errors import UserError
from ddp_trainer.data.arrays import VOID, Datasets, ImageData
from ddp_trainer.tasks import IGNORED, Classification, LanguageModel, Segmentation, Task, build_task

CLASSES = 5


def scene(count: int = 6, void: float = 0.2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, CLASSES, (count, 7, 9), generator=generator)
    outputs = torch.randn(count, CLASSES, 7, 9, generator=generator)
    outputs.scatter_add_(1, targets.unsqueeze(1), torch.full((count, 1, 7, 9), 1.5))
    targets[torch.rand(targets.shape, generator=generator) < void] = 255
    return outputs, targets


def test_mean_iou_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import jaccard_score

    outputs, targets = scene()
    task = Segmentation(CLASSES)
    scores = task.scores(task.totals(outputs, targets).tolist())
    known = targets != 255
    reference = jaccard_score(targets[known], outputs.argmax(1)[known], average="macro")
    assert scores["mean_iou"] == pytest.approx(reference, abs=1e-6)
    assert scores["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets)[known].float().mean()))
    loss = torch.nn.functional.cross_entropy(outputs, targets, ignore_index=255)
    assert scores["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert float(task.loss(outputs, targets)) == pytest.approx(float(loss), rel=1e-5)


def test_confusion_of_parts_adds_up_over_ranks() -> None:
    outputs, targets = scene()
    task = Segmentation(CLASSES)
    parts = task.totals(outputs[:1], targets[:1]) + task.totals(outputs[1:], targets[1:])
    whole = task.totals(outputs, targets)
    assert len(whole) == task.num_totals
    assert torch.equal(parts[1:], whole[1:])
    # The mean of the parts' scores would differ.
    each = [task.scores(task.totals(outputs[i : i + 1], targets[i : i + 1]).tolist())["mean_iou"] for i in range(6)]
    assert sum(each) / 6 != pytest.approx(task.scores(whole.tolist())["mean_iou"], abs=1e-4)


def test_class_that_is_nowhere_is_not_part_of_mean() -> None:
    targets = torch.zeros(1, 2, 2, dtype=torch.int64)
    outputs = torch.zeros(1, CLASSES, 2, 2)
    outputs[:, 0] = 1.0
    outputs[0, 1, 0, 0] = 2.0
    task = Segmentation(CLASSES)
    # Class 0: three of four; class 1: predicted once, never true.
    assert task.scores(task.totals(outputs, targets).tolist())["mean_iou"] == pytest.approx((3 / 4 + 0) / 2)


def test_all_void_images_are_not_counted() -> None:
    outputs, targets = scene(void=2.0)
    task = Segmentation(CLASSES)
    assert float(task.loss(outputs, targets)) == 0.0
    assert task.totals(outputs, targets).sum() == 0.0
    assert task.scores([0.0] * task.num_totals) == {"loss": 0.0, "accuracy": 0.0, "mean_iou": 0.0}


def test_correct_answers_are_counted_with_all_answers() -> None:
    outputs, targets = scene()
    right, answers = Segmentation(CLASSES).correct(outputs, targets).tolist()
    known = targets != 255
    assert answers == int(known.sum())
    assert right == int((outputs.argmax(1) == targets)[known].sum())
    logits = torch.eye(4)[[0, 1, 2, 2]]
    classes = torch.tensor([0, 1, 2, 3])
    assert Classification().correct(logits, classes).tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (torch.zeros(4, 9), r"logits of shape \(4, 9\); return logits of shape \(4, 10 or more\)"),
        (torch.zeros(4, 10, 1), r"shape \(4, 10, 1\)"),
        (torch.zeros(3, 10), r"shape \(3, 10\)"),
        ({"out": torch.zeros(4, 10)}, "returned dict"),
    ],
)
def test_outputs_of_wrong_shape_are_refused(outputs: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Classification(num_classes=10).check(outputs, torch.zeros(4, dtype=torch.int64))


def test_more_outputs_than_classes_are_good() -> None:
    Classification(num_classes=10).check(torch.zeros(4, 1000), torch.zeros(4, dtype=torch.int64))
    outputs, targets = scene()
    wide = torch.cat([outputs, torch.full((6, 3, 7, 9), -9.0)], dim=1)
    task = Segmentation(CLASSES)
    task.check(wide, targets)
    assert torch.equal(task.totals(wide, targets)[1:], task.totals(outputs, targets)[1:])
    with pytest.raises(UserError, match="shape"):
        task.check(outputs[:, :, :3], targets)


def test_masks_select_segmentation() -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    classes = Datasets(*[ImageData(images, torch.tensor([0, 1]))] * 2, num_classes=2, mean=(0.0,), std=(1.0,))
    masks = Datasets(*[ImageData(images, images[:, 0])] * 2, num_classes=2, mean=(0.0,), std=(1.0,))
    assert build_task(classes) == Classification(2)
    assert build_task(masks) == Segmentation(2)


@pytest.mark.parametrize(
    ("task", "ignored"), [(Segmentation(3), VOID), (Classification(num_classes=3), IGNORED), (LanguageModel(), IGNORED)]
)
def test_masked_targets_count_neither_in_loss_nor_scores(task: Task, ignored: int) -> None:
    random = torch.Generator().manual_seed(0)
    shape = {"Segmentation": (4, 3, 2, 2), "Classification": (4, 3), "LanguageModel": (4, 2, 3)}[type(task).__name__]
    outputs = torch.randn(shape, generator=random)
    classes = 2 if isinstance(task, LanguageModel) else 1
    targets = outputs.argmax(dim=classes)
    masked = targets.clone()
    masked[2:] = ignored
    torch.testing.assert_close(task.loss(outputs, masked), task.loss(outputs[:2], targets[:2]))
    assert task.correct(outputs, masked).tolist() == task.correct(outputs[:2], targets[:2]).tolist()
    scores = task.scores(task.totals(outputs, masked).tolist())
    assert scores == pytest.approx(task.scores(task.totals(outputs[:2], targets[:2]).tolist()))
    count = task.count_elements(masked)
    assert count is not None
    assert count.item() == targets[:2].numel()
    nothing = torch.full_like(targets, ignored)
    assert task.loss(outputs, nothing).item() == 0.0


def test_loss_of_custom_task_is_averaged_over_its_elements() -> None:
    class Masked(Task):
        def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            valid = target >= 0
            return ((output - target).square() * valid).sum() / valid.sum().clamp(min=1)

        def count_elements(self, target: torch.Tensor) -> torch.Tensor:
            return (target >= 0).sum()

    task = Masked()
    parts = [torch.tensor([[1.0, -1.0]]), torch.tensor([[3.0, 5.0]])]
    totals = sum(task.totals(torch.zeros(1, 2), part) for part in parts)
    assert isinstance(totals, torch.Tensor)
    assert task.scores(totals.tolist()) == {"loss": pytest.approx((1 + 9 + 25) / 3)}
