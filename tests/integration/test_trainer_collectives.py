"""Results that ranks compute together, against one process with all data: batch norm, masked losses, scores."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_trainer.tasks import Segmentation
from tests.support.trainer_ranks import run_script

pytestmark = pytest.mark.process


def loaded(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / f"{rank}.pt", weights_only=True)
    return state


# The same network on the same samples: two ranks have 5 and 3 samples of a batch of 8.
NETWORK = """
from torch import nn
torch.manual_seed(0)
network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6),
                        nn.Flatten(), nn.Linear(96, 5), nn.BatchNorm1d(5)).double()
with torch.no_grad():
    for parameter in network.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
images = torch.randn(8, 3, 6, 6, dtype=torch.float64) * 3 + 1
weights = torch.randn(8, 5, dtype=torch.float64)
"""
# In float32, in float64, with mixed precision, and with torch.compile as one graph.
SYNC = (
    """
import copy, warnings
from contextlib import nullcontext
warnings.filterwarnings("ignore", "<class 'torch.autograd.function.Function'>")  # of torch's own compiler
"""
    + NETWORK
    + """
from ddp_trainer.models.layers import convert
share = slice(0, 5) if world.rank == 0 else slice(5, 8)
for kind in ("float32", "float64", "bfloat16", "compiled"):
    dtype = torch.float64 if kind == "float64" else torch.float32
    mixed = torch.autocast("cpu", torch.bfloat16) if kind == "bfloat16" else nullcontext()
    whole = convert(copy.deepcopy(network).to(dtype))
    run = torch.compile(whole, fullgraph=True, backend="aot_eager") if kind == "compiled" else whole
    batch = images[share].to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    for _ in range(3):
        whole.zero_grad()
        batch.grad = None
        with mixed:
            output = run(batch)
        (output * weights[share].to(dtype)).sum().backward()
    result = dict(whole.state_dict(), output=output.detach(), input=batch.grad)
    result |= {f"grad.{name}": parameter.grad for name, parameter in whole.named_parameters()}
    whole.eval()
    result["evaluated"] = whole(batch).detach()
    torch.save(result, f"{arguments[0]}/{kind}-{world.rank}.pt")
"""
)


def test_two_ranks_batch_norm_is_that_of_whole_batch(tmp_path: Path) -> None:
    run_script(tmp_path, SYNC, 2)
    names: dict[str, object] = {"torch": torch}
    exec(NETWORK, names)
    network = names["network"]
    images = names["images"]
    weights = names["weights"]
    assert isinstance(network, nn.Module)
    assert isinstance(images, torch.Tensor)
    images.requires_grad_()
    for _ in range(3):
        network.zero_grad()
        images.grad = None
        output = network(images)
        (output * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    network.eval()
    evaluated = network(images).detach()
    for kind, digits in (("float32", 5e-5), ("float64", 1e-12), ("bfloat16", 0.2), ("compiled", 5e-5)):
        first, second = (torch.load(tmp_path / f"{kind}-{rank}.pt", weights_only=True) for rank in range(2))
        # Compared for a whole tensor, because numbers near zero have few correct digits.
        close = functools.partial(_close, digits=digits)
        close(torch.cat([first["output"], second["output"]]), output.detach())
        close(torch.cat([first["input"], second["input"]]), images.grad)
        for name, gradient in gradients.items():
            close(first[f"grad.{name}"] + second[f"grad.{name}"], gradient)
        for name, buffer in network.named_buffers():
            close(first[name], buffer)
            assert torch.equal(first[name], second[name])
        close(torch.cat([first["evaluated"], second["evaluated"]]), evaluated)


def _close(ours: torch.Tensor, theirs: torch.Tensor | None, digits: float) -> None:
    assert theirs is not None
    assert float((ours.double() - theirs).norm()) <= digits * (1.0 + float(theirs.double().norm()))


CONFUSION = """
from ddp_trainer.tasks import Segmentation
torch.manual_seed(0)
outputs, targets = torch.randn(5, 4, 6, 6), torch.randint(0, 4, (5, 6, 6))
targets[:, 0] = 255
task = Segmentation(4)
totals = torch.zeros(task.num_totals, dtype=torch.float64)
for index in range(world.rank, 5, world.size):
    totals += task.totals(outputs[index : index + 1], targets[index : index + 1])
summed = torch.tensor(world.sum(totals.tolist()), dtype=torch.float64)
torch.save({"outputs": outputs, "targets": targets, "totals": summed}, f"{arguments[0]}/{world.rank}.pt")
"""


def test_confusion_matrix_of_two_ranks_is_that_of_all_images(tmp_path: Path) -> None:
    run_script(tmp_path, CONFUSION, 2)
    first = loaded(tmp_path, 0)
    second = loaded(tmp_path, 1)
    assert torch.equal(first["totals"], second["totals"])
    whole = Segmentation(4).totals(first["outputs"], first["targets"])
    assert torch.equal(first["totals"][1:], whole[1:])
    assert float(first["totals"][0]) == pytest.approx(float(whole[0]), rel=1e-6)


# Samples have from 0 to 15 valid targets of 16. Ranks have 4 samples each.
MASKED = """
import copy
from torch import nn
from ddp_trainer.config.run import resolve
from ddp_trainer.data.loader import Batch
from ddp_trainer.engine import Engine
from ddp_trainer.optim import build_optimizer
from ddp_trainer.precision import Precision
from ddp_trainer.tasks import LanguageModel, Segmentation

class Tokens(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.flatten(2).transpose(1, 2))

def train(task, network, inputs, targets, world):
    config = resolve(None, None, {"data": {"batch_size": len(inputs)}, "optim": {"clip_norm": 1.0}})
    model = copy.deepcopy(network)
    parts = build_optimizer(config.optim, model.parameters()), Precision(config.precision, world.device)
    engine = Engine(model, task, *parts, world, config)
    losses = [engine.step(Batch(inputs, targets), step, 0.5).loss for step in range(3)]
    return [*model.parameters(), *losses]

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
inputs = torch.rand(8, 3, 4, 4)
share = slice(4 * world.rank, 4 * world.rank + 4)
alone = World(RankEnv(), torch.device("cpu"))
for task, network, ignored, shape in (
    (Segmentation(3), nn.Conv2d(3, 3, 1), 255, (8, 4, 4)),
    (LanguageModel(), Tokens(3, 3), -100, (8, 16)),
):
    targets = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(1))  # a step seeds torch's own
    for sample in range(8):
        targets[sample].view(-1)[: 16 - 2 * sample] = ignored
    expected = train(task, network, inputs, targets, alone)
    trained = train(task, network, inputs[share], targets[share], world)
    torch.testing.assert_close(trained[:-3], expected[:-3], rtol=0, atol=1e-14)
    # A rank reports the loss of its own elements.
    valid = (targets[share] != ignored).sum()
    means = world.sum([float(valid * trained[-3]), float(valid)])
    torch.testing.assert_close(torch.tensor(means[0] / means[1]), expected[-3], rtol=0, atol=1e-14)
"""


def test_masked_targets_on_two_ranks_give_weights_of_one_large_batch(tmp_path: Path) -> None:
    run_script(tmp_path, MASKED, 2)
