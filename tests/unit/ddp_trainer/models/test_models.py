"""The documents' networks: shapes, sizes, and the refusal of unsuitable images."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from ddp_sdk.errors import UserError
from ddp_trainer.config.presets import PRESETS
from ddp_trainer.models import ModelConfig, build_model
from ddp_trainer.models.layers import SyncBatchNorm, convert
from ddp_trainer.models.networks import WideResNet
from ddp_trainer.options import build
from ddp_trainer.tasks import Segmentation

CPU = torch.device("cpu")


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def wide_resnet_size(in_channels: int, classes: int, widen: int) -> int:
    """Return the number of weights of the document's network, counted layer by layer."""

    def layer(a: int, b: int) -> int:
        return 9 * a * b + 2 * b

    sizes = [16, 16 * widen, 32 * widen, 64 * widen]
    total = layer(in_channels, 16)
    for a, b in pairwise(sizes):
        total += layer(a, b) + layer(b, b) + (a * b + b) + 2 * layer(b, b)
    return total + sizes[-1] * classes + classes


def test_wide_resnet_has_documents_channels() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name="wide-resnet"), 1, 10)
    assert parameters(model) == wide_resnet_size(1, 10, 10)
    widths = [module.num_features for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert widths == [16] + [160] * 4 + [320] * 4 + [640] * 4
    assert model(torch.zeros(2, 1, 28, 28, device="meta")).shape == (2, 10)


def test_wide_resnet_averages_whole_image_by_default() -> None:
    torch.manual_seed(0)
    whole, window = (WideResNet(ModelConfig(widen=1, pool=pool), 3, 10) for pool in (None, 7))
    window.load_state_dict(whole.state_dict())
    whole.eval()
    window.eval()
    small = torch.randn(1, 3, 28, 28)
    large = torch.randn(1, 3, 32, 32)
    # 28 pixels become 7, 32 become 8.
    torch.testing.assert_close(whole(small), window(small))
    assert not torch.allclose(whole(large), window(large), rtol=1e-3)


def test_wide_resnet_has_its_dropout_between_convolutions() -> None:
    model = build_model(ModelConfig(name="wide-resnet", widen=1, dropout=0.01), 1, 10)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.01] * 6


@pytest.mark.parametrize(("name", "size"), [("resnet18", 11_181_642), ("resnet50", 23_528_522)])
def test_torchvisions_resnets_have_head_for_ten_classes(name: str, size: int) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name), 3, 10)
    assert parameters(model) == size


def test_more_outputs_than_classes_are_accepted_and_fewer_refused() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name="resnet50", num_outputs=1000), 3, 10)
    assert parameters(model) == 25_557_032
    with pytest.raises(UserError, match="5 is less than the data's 10 classes"):
        build_model(ModelConfig(num_outputs=5), 3, 10)


def test_deeplab_predicts_class_per_pixel_and_needs_colour() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name="deeplabv3_resnet101"), 3, 21)
    model.eval()
    assert model(torch.zeros(2, 3, 40, 40, device="meta")).shape == (2, 21, 40, 40)
    with pytest.raises(UserError, match=r"needs images of 3 channels, but the data has 1"):
        build_model(ModelConfig(name="deeplabv3_resnet101"), 1, 21)


def test_deeplab_learns_from_masks_with_void() -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="deeplabv3_resnet50"), 3, 4).train()
    masks = torch.zeros(2, 16, 16, dtype=torch.int64)
    masks[0, 4:12] = 1
    masks[1, :, 4:12] = 2
    masks[:, :2] = 255
    images = (masks.clamp(max=3).unsqueeze(1) - 1.0).expand(2, 3, 16, 16)
    task = Segmentation(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loss = task.loss(model(images), masks)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    optimizer.step()
    with torch.no_grad():
        assert task.loss(model(images), masks) < loss


def test_grey_images_get_first_layer_of_their_own() -> None:
    model = build_model(ModelConfig(name="resnet18"), 1, 10)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"python-reference-gpt"}))
def test_model_of_every_preset_accepts_its_images(name: str) -> None:
    config = build(ModelConfig, PRESETS[name].values["model"])
    data = PRESETS[name].values["data"]["name"]
    channels, side, classes = {"digits": (1, 8, 10), "cifar10": (3, 32, 10), "fashion-mnist": (1, 28, 10)}.get(
        data, (3, 64, 21)
    )
    with torch.device("meta"):
        model = build_model(config, channels, classes).eval()
    shape = model(torch.zeros(2, channels, side, side, device="meta")).shape
    assert shape[:2] == (2, classes)


# Synchronised batch norm, on one process


def test_conversion_keeps_parameters_names_and_other_layers() -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(), 1, 10)
    model.train()
    before = dict(model.named_parameters())
    images = torch.randn(4, 1, 8, 8)
    expected = model(images).detach()
    converted = convert(model)
    assert dict(converted.named_parameters()).keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in converted.named_parameters())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in converted.modules())
    # Without other ranks it equals ordinary batch norm.
    torch.testing.assert_close(converted(images).detach(), expected)


def test_state_moves_between_synchronised_and_plain_batch_norm() -> None:
    plain = nn.BatchNorm2d(3)
    plain(torch.randn(4, 3, 2, 2))
    sync = SyncBatchNorm(nn.BatchNorm2d(3))
    sync.load_state_dict(plain.state_dict())
    assert all(torch.equal(sync.state_dict()[name], value) for name, value in plain.state_dict().items())
    with pytest.raises(ValueError, match=r"batch norm expects a shape of \(N, C, ...\)"):
        sync(torch.zeros(3))


def test_function_of_user_must_build_module() -> None:
    with pytest.raises(UserError, match=r"model\.name: builtins:slice returned slice; return a torch\.nn\.Module"):
        build_model(ModelConfig(name="builtins:slice"), 3, 10)
