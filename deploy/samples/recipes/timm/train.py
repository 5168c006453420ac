"""Train a model of timm on the folders of ImageNet, and resume from the last epoch."""

import argparse
import os

import timm
import torch
import torch.distributed as dist
from timm.data import create_dataset, create_transform, resolve_model_data_config
from timm.scheduler import CosineLRScheduler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("data", help="folder that has a folder of images for each class below train")
parser.add_argument("--model", default="resnet18")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--workers", type=int, default=4)
options = parser.parse_args()
PATH = os.path.join(os.environ.get("DDP_CHECKPOINT_DIR", "."), "last.pt")

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

data = create_dataset("", root=options.data, split="train")
torch.manual_seed(0)
network = timm.create_model(options.model, num_classes=len(data.reader.class_to_idx)).to(device)
facts = resolve_model_data_config(network)
data.transform = create_transform(
    (3, options.size, options.size), is_training=True, mean=facts["mean"], std=facts["std"]
)
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, options.batch_size, sampler=sampler, num_workers=options.workers, drop_last=True)
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
scheduler = CosineLRScheduler(optimizer, t_initial=options.epochs)

first = 0
if os.path.exists(PATH):
    state = torch.load(PATH, map_location=device, weights_only=True)
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]

for epoch in range(first, options.epochs):
    torch.manual_seed(1000 * epoch + rank)  # the augmentation of a resumed epoch
    sampler.set_epoch(epoch)
    scheduler.step(epoch)
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, PATH + ".tmp")
        os.replace(PATH + ".tmp", PATH)
        print(f"epoch {epoch + 1}/{options.epochs}: loss {loss.item():.4f}", flush=True)

dist.destroy_process_group()
