from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from ddp_sdk.errors import UserError
from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets, ImageData
from ddp_trainer.data.augment import DRAWS, Augmentation
from ddp_trainer.data.datasets import load_datasets
from ddp_trainer.data.loader import TrainLoader, ValidationLoader
from ddp_trainer.data.published import read_digits
from ddp_trainer.data.sampling import derive_seed, samples_per_rank, train_order, uniforms, validation_order
from ddp_trainer.data.sources import Place

CPU = torch.device("cpu")


def numbered(count: int) -> Datasets:
    """Images of 2x2 pixels whose label is their index."""
    labels = torch.arange(count)
    images = (labels % 256).to(torch.uint8).view(-1, 1, 1, 1).expand(count, 1, 2, 2).contiguous()
    data = ImageData(images, labels)
    return Datasets(data, data, num_classes=count, mean=(0.0,), std=(1.0,))


def loader(count: int, batch: int, *, rank: int = 0, world: int = 1, drop_last: bool = False) -> TrainLoader:
    config = DataConfig(batch_size=batch, drop_last=drop_last)
    return TrainLoader(numbered(count), config, Place(rank, world, CPU), seed=3)


# Digits


def test_digits_are_those_of_scikit_learn() -> None:
    images, labels = read_digits()
    from sklearn.datasets import load_digits  # slow to import

    expected = load_digits()
    assert np.array_equal(images[:, 0].numpy(), expected.images)
    assert np.array_equal(labels.numpy(), expected.target)


def test_digits_split_is_same_in_all_runs_and_complete() -> None:
    first = load_datasets(DataConfig())
    again = load_datasets(DataConfig())
    assert torch.equal(first.validation.images, again.validation.images)
    assert len(first.train) + len(first.validation) == 1797
    assert len(first.validation) == round(0.2 * 1797)


def test_missing_scikit_learn_is_reported_with_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        read_digits()


# Mistakes in a user's dataset


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64), "give uint8"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"shape \(N, C, H, W\)"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2), "give int64"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "for 2 images"),
    ],
)
def test_data_of_wrong_type_or_shape_is_refused(images: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ImageData(images, labels)


def test_labels_outside_classes_are_refused() -> None:
    datasets = numbered(4)
    with pytest.raises(UserError, match="labels run from 0 to 3 with 3 classes"):
        dataclasses.replace(datasets, num_classes=3)


def test_data_from_users_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_trainer.data.published.load_digits", lambda config: "nothing")
    with pytest.raises(UserError, match=r"returned str; return ddp_trainer.data.arrays.Datasets"):
        load_datasets(DataConfig(name="ddp_trainer.data.published:load_digits"))
    with pytest.raises(UserError, match="module 'no_such_module' of"):
        load_datasets(DataConfig(name="no_such_module:load"))
    with pytest.raises(UserError, match="has no function 'lod'"):
        load_datasets(DataConfig(name="ddp_trainer.data.published:lod"))


# Order


@pytest.mark.parametrize("length", [10, 11, 3, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("epoch", [0, 5])
def test_training_order_is_that_of_distributed_sampler(length: int, world: int, epoch: int) -> None:
    for rank in range(world):
        sampler = DistributedSampler(range(length), world, rank, shuffle=True, seed=7)  # type: ignore[arg-type, var-annotated]
        sampler.set_epoch(epoch)
        order = train_order(length, seed=7, epoch=epoch, rank=rank, world_size=world)
        assert order.tolist() == list(sampler)
        assert len(order) == samples_per_rank(length, world, False)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 2), (4, 1)])
def test_resume_on_other_ranks_repeats_and_skips_nothing(before: int, after: int) -> None:
    length = 60
    batch = 2
    steps = 3
    first = [train_order(length, seed=1, epoch=2, rank=r, world_size=before)[: batch * steps] for r in range(before)]
    consumed = batch * steps * before
    rest = [train_order(length, seed=1, epoch=2, rank=r, world_size=after, consumed=consumed) for r in range(after)]
    assert sorted(torch.cat(first + rest).tolist()) == list(range(length))


@pytest.mark.parametrize(("length", "consumed"), [(10, 7), (3, 2), (2, 1)])
def test_last_step_after_resume_is_padded_from_epoch_start(length: int, consumed: int) -> None:
    whole = train_order(length, seed=1, epoch=0, rank=0, world_size=1).tolist()
    shares = [
        train_order(length, seed=1, epoch=0, rank=rank, world_size=4, consumed=consumed).tolist() for rank in range(4)
    ]
    rest = whole[consumed:]
    assert [number for share in shares for number in share] == (rest + whole + whole)[:4]


def test_drop_last_uses_no_sample_twice() -> None:
    shares = [train_order(11, seed=1, epoch=0, rank=r, world_size=4, drop_last=True) for r in range(4)]
    assert [len(share) for share in shares] == [2, 2, 2, 2] == [samples_per_rank(11, 4, True)] * 4
    assert len(set(torch.cat(shares).tolist())) == 8


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_validation_uses_every_sample_once(world: int) -> None:
    shares = [validation_order(7, rank=rank, world_size=world) for rank in range(world)]
    assert sorted(torch.cat(shares).tolist()) == list(range(7))


# Random numbers


def test_random_numbers_belong_to_sample_not_to_batch() -> None:
    samples = np.arange(100)
    whole = uniforms(samples, 3, 5, 1, 0)
    assert np.array_equal(uniforms(samples[40:60], 3, 5, 1, 0), whole[40:60])
    assert np.array_equal(uniforms(samples[::-1].copy(), 3, 5, 1, 0), whole[::-1])


def test_random_numbers_are_uniform_and_independent() -> None:
    drawn = uniforms(np.arange(50_000), 3, 11, 1, 4)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts = np.stack([np.histogram(column, bins=20, range=(0, 1))[0] for column in drawn.T])
    # Chi-squared with 19 degrees of freedom exceeds 43.8 once in a thousand times; the seeds are fixed.
    assert (((counts - 2500.0) ** 2 / 2500.0).sum(axis=1) < 43.8).all()
    correlation = np.corrcoef(np.concatenate([drawn.T, drawn[1:].T[:, [*range(49_999), 0]]]))
    assert np.abs(correlation - np.eye(6)).max() < 0.02


def test_derived_seeds_do_not_collide() -> None:
    seeds = {derive_seed(seed, stream, step) for seed in range(10) for stream in range(10) for step in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_stable() -> None:
    # A later version that resumes a run draws the same numbers.
    assert [derive_seed(0, 2, 12345, 3), derive_seed(-1, 2**70 + 5)] == [6850427448243175839, 4273974289816830767]
    expected = [[0.7505671977996826, 0.6695137023925781], [0.03634607791900635, 0.1463678479194641]]
    assert uniforms(np.array([0, 49_999]), 2, 5, 1, 2).tolist() == expected


# Augmentation


def test_crops_and_flips_are_drawn_for_every_image_and_evenly() -> None:
    # One bright pixel in the middle of a row shows the offset and the flip.
    images = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    images[0, 0, 2, 1] = 255
    augmentation = Augmentation(1, True)
    labels = torch.zeros(18_000, dtype=torch.int64)
    draws = torch.from_numpy(uniforms(np.arange(18_000), DRAWS, 1, 2, 3))
    batch, _ = augmentation.batch(images.expand(18_000, -1, -1, -1), labels, draws)
    places = torch.bincount(batch.flatten(1).argmax(dim=1), minlength=25).reshape(5, 5)
    # Vertical offsets -1, 0, 1; horizontal 0, 1, 2 without flip and 2, 3, 4 with flip: 2 occurs twice.
    expected = torch.zeros(5, 5)
    expected[1:4] = torch.tensor([1000, 1000, 2000, 1000, 1000])
    deviation = (places - expected).abs()
    assert not places[expected == 0].any()
    assert (deviation <= 4.5 * expected.sqrt()).all()


# Loader


def test_batches_of_ranks_form_batch_of_one_process() -> None:
    whole = [batch.targets.tolist() for batch in loader(40, 8).epoch(3)]
    parts = [[batch.targets.tolist() for batch in loader(40, 4, rank=rank, world=2).epoch(3)] for rank in range(2)]
    assert whole == [[label for pair in zip(a, b, strict=True) for label in pair] for a, b in zip(*parts, strict=True)]


def test_epoch_resumed_in_middle_equals_uninterrupted_epoch() -> None:
    whole = [batch.targets.tolist() for batch in loader(42, 4, rank=1, world=2).epoch(3)]
    rest = [batch.targets.tolist() for batch in loader(42, 4, rank=1, world=2).epoch(3, consumed=16)]
    assert rest == whole[2:]


def test_batches_are_normalised() -> None:
    datasets = dataclasses.replace(numbered(10), mean=(4.5,), std=(2.0,))
    train_loader = TrainLoader(datasets, DataConfig(batch_size=10), Place(0, 1, CPU), seed=0)
    batch = next(train_loader.epoch(0))
    expected = ((batch.targets.float() - 4.5) / 2.0).view(-1, 1, 1, 1).expand(10, 1, 2, 2)
    torch.testing.assert_close(batch.inputs, expected)


def test_augmentation_is_same_on_any_number_of_ranks() -> None:
    datasets = load_datasets(DataConfig())

    def epoch(batch: int, rank: int, world: int) -> dict[int, torch.Tensor]:
        config = DataConfig(batch_size=batch, augment=("crop", "flip"), crop_padding=2)
        train_loader = TrainLoader(datasets, config, Place(rank, world, CPU), seed=1)
        order = train_order(train_loader.length, seed=1, epoch=0, rank=rank, world_size=world)
        images = torch.cat([part.inputs for part in train_loader.epoch(0)])
        return dict(zip(order.tolist(), images, strict=True))

    alone = epoch(64, 0, 1)
    together = epoch(10, 0, 2) | epoch(10, 1, 2)
    assert alone.keys() == together.keys()
    assert all(torch.equal(alone[index], together[index]) for index in alone)


def test_more_ranks_than_samples_is_user_error() -> None:
    with pytest.raises(UserError, match="5 ranks share 4 samples"):
        loader(4, 1, world=5)


def test_batch_larger_than_data_with_drop_last_is_user_error() -> None:
    with pytest.raises(UserError, match=r"data.batch_size: .*drop_last"):
        loader(10, 6, world=2, drop_last=True)
    assert len(list(loader(10, 6, world=2).epoch(0))) == 1


def test_validation_loader_yields_each_sample_once_and_may_be_empty() -> None:
    config = DataConfig(eval_batch_size=2)
    datasets = numbered(5)
    for world in (1, 2, 7):
        seen = []
        batches = []
        loaders = [ValidationLoader(datasets, config, Place(rank, world, CPU)) for rank in range(world)]
        for loader in loaders:
            labels = [batch.targets.tolist() for batch in loader]
            seen += [number for batch in labels for number in batch]
            batches.append(len(labels))
        assert sorted(seen) == list(range(5))
        # Ranks with fewer batches than their peers take part in the same number of rounds.
        assert {len(list(loader.rounds())) for loader in loaders} == {max(batches)}
