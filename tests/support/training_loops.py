"""Training loops as users write them, without a line for the launcher. The first argument names the loop."""

import argparse
import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

PAUSE = 0.1  # seconds; simulates the work of a larger model


def make_data(samples: int = 960) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return batches of 16 small images."""
    images = torch.randn(samples, 1, 8, 8)
    return DataLoader(TensorDataset(images, (images.mean(dim=(1, 2, 3)) > 0).long()), batch_size=16)


def make_cnn() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def cnn(epochs: int) -> None:
    """Train as pytorch/examples mnist: the line counts samples."""
    model = DistributedDataParallel(make_cnn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = make_data()
    for epoch in range(1, epochs + 1):
        for index, (images, labels) in enumerate(data):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            time.sleep(PAUSE)
            if index % 10 == 0 and dist.get_rank() == 0:
                share = 100.0 * index / len(data)
                done = index * len(images)
                print(f"Train Epoch: {epoch} [{done}/960 ({share:.0f}%)]\tLoss: {loss.item():.6f}", flush=True)


def tutorial(epochs: int) -> None:
    """Train with the line of many tutorials."""
    model = DistributedDataParallel(make_cnn())
    optimizer = torch.optim.Adam(model.parameters())
    data = make_data()
    for epoch in range(epochs):
        for index, (images, labels) in enumerate(data):
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(PAUSE)
            if (index + 1) % 10 == 0 and dist.get_rank() == 0:
                place = f"Epoch [{epoch + 1}/{epochs}], Step [{index + 1}/{len(data)}]"
                print(f"{place}, Loss: {loss.item():.4f}", flush=True)


def nano_gpt(epochs: int) -> None:
    """Train with gradient accumulation, a learning rate schedule and clipping, as nanoGPT does."""
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(60 * epochs):
        started = time.time()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 10)
        for micro_step in range(4):
            model.require_backward_grad_sync = micro_step == 3
            tokens = torch.randint(0, 64, (8, 16))
            logits = model(tokens)
            loss = cross_entropy(logits.flatten(0, 1), tokens.flatten()) / 4
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        time.sleep(PAUSE)
        if step % 10 == 0 and dist.get_rank() == 0:
            milliseconds = 1000 * (time.time() - started)
            print(f"iter {step}: loss {loss.item() * 4:.4f}, time {milliseconds:.2f}ms, mfu -100.00%", flush=True)


def gan(epochs: int) -> None:
    """Train a generator and a discriminator in turn."""
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(epochs):
        for index in range(60):
            of_discriminator.zero_grad()
            criterion(discriminator(torch.randn(16, 8)), torch.ones(16, 1)).backward()
            fake = generator(torch.randn(16, 4))
            criterion(discriminator(fake.detach()), torch.zeros(16, 1)).backward()
            of_discriminator.step()
            of_generator.zero_grad()
            loss = criterion(discriminator(fake), torch.ones(16, 1))
            loss.backward()
            of_generator.step()
            dist.barrier()
            time.sleep(PAUSE)
            if index % 10 == 9 and dist.get_rank() == 0:
                print(f"[{epoch}/{epochs}][{index}/60] Loss_G: {loss.item():.4f}", flush=True)


def lbfgs(epochs: int) -> None:
    """Train with closures."""
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    inputs = torch.randn(32, 8)
    for step in range(1, 60 * epochs + 1):

        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean() + 1.0
            loss.backward()
            return loss

        loss = optimizer.step(evaluate)  # type: ignore[arg-type]
        time.sleep(PAUSE)
        if step % 5 == 0 and dist.get_rank() == 0:
            print(f"step {step}/{60 * epochs} | loss: {float(loss):.5f}", flush=True)


def fsdp(epochs: int) -> None:
    """Train a sharded model and print one line an epoch."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for _ in range(60):
            inputs = torch.randn(32, 16)
            loss = cross_entropy(model(inputs), (inputs.sum(dim=1) > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(PAUSE)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}/{epochs}: loss {loss.item():.4f}", flush=True)


def dots(epochs: int) -> None:
    """Print nothing but a dot a step."""
    model = DistributedDataParallel(make_cnn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for images, labels in make_data():
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(PAUSE)
            print(".", end="", flush=True)


def bars(epochs: int) -> None:
    """Show a bar of tqdm for each epoch and for each validation."""
    model = DistributedDataParallel(make_cnn())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = make_data()
    for epoch in range(epochs):
        bar = tqdm(data, desc=f"Epoch {epoch}", disable=dist.get_rank() != 0)
        for images, labels in bar:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(PAUSE)
            bar.set_postfix(loss=f"{loss.item():.3f}")
        with torch.no_grad():
            for images, _ in tqdm(make_data(160), desc="Validation", disable=dist.get_rank() != 0):
                model.module(images)


def records(epochs: int) -> None:
    """Print a dict of Python every few steps and a bar, as Hugging Face's Trainer does."""
    model = DistributedDataParallel(make_cnn())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    data = make_data()
    steps = epochs * len(data)
    bar = tqdm(total=steps, disable=dist.get_rank() != 0)
    for epoch in range(epochs):
        for index, (images, labels) in enumerate(data):
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(PAUSE)
            bar.update()
            if index % 10 == 9 and dist.get_rank() == 0:
                row = {"loss": f"{loss.item():.4g}", "learning_rate": "5e-05", "epoch": f"{epoch + index / 60:.4g}"}
                bar.write(str(row), file=sys.stderr)


def lines_of_json(epochs: int) -> None:
    """Print a JSON object every few steps; the total is an option of the command."""
    model = DistributedDataParallel(make_cnn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    for _ in range(epochs):
        for images, labels in make_data():
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            time.sleep(PAUSE)
            if step % 10 == 0 and dist.get_rank() == 0:
                print(json.dumps({"step": step, "loss": loss.item(), "lr": 0.1}), flush=True)


def lines(epochs: int, line: str, steps: int = 40) -> None:
    """Print a line in the given format at every second step: its names are those of the values below."""
    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, epochs * steps + 1):
        loss = cross_entropy(model(torch.randn(16, 8)), torch.randint(0, 2, (16,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(PAUSE)
        if step % 2 == 0 and dist.get_rank() == 0:
            batch = (step - 1) % steps + 1
            values = {"step": step, "total": epochs * steps, "batch": batch, "of_epoch": steps, "samples": 16 * batch}
            epoch = (step - 1) // steps
            shown = line.format(**values, epoch=epoch, next_epoch=epoch + 1, epochs=epochs, loss=1.0 + step / 1000)
            print(shown, flush=True, end="" if shown.startswith("\r") else "\n")
    print(flush=True)  # as a bar does that is closed


def main() -> None:
    """Run a loop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("loop")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--line")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    options = {"line": arguments.line} if arguments.line else {}
    globals()[arguments.loop](arguments.epochs, **options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
