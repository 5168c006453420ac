"""`ddp` translates a command line of torchrun."""

import pytest

from ddp_cli.commands import main
from ddp_cli.commands.torchrun import explain_torchrun

TORCHRUN = "ddp starts the script with torchrun itself; name only the script"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            "run train.py --nproc_per_node 2",
            "ddp run: use --procs for torchrun's --nproc_per_node. Type: ddp run train.py --procs 2",
        ),
        (
            "run train.py --nproc-per-node=gpu --nnodes=1:4 --rdzv_backend c10d --epochs 3",
            "ddp run: use --procs for torchrun's --nproc-per-node; use --nodes for torchrun's --nnodes; "
            "leave out torchrun's --rdzv_backend. Type: ddp run train.py --nodes 1 -- --epochs 3",
        ),
        (
            "run --cpu torchrun --standalone --nproc_per_node=2 train.py --nnodes 7 --lr 1",
            f"ddp run: torchrun: {TORCHRUN}; use --procs for torchrun's --nproc_per_node; "
            "leave out torchrun's --standalone. Type: ddp run --cpu train.py --procs 2 -- --nnodes 7 --lr 1",
        ),
        ("run torchrun", f"ddp run: torchrun: {TORCHRUN}. Type: ddp run train.py"),
        ("run python train.py --x 1", f"ddp run: python: {TORCHRUN}. Type: ddp run train.py -- --x 1"),
        (
            "run -m torch.distributed.run --nproc_per_node 2 train.py -- --y",
            f"ddp run: -m torch.distributed.run: {TORCHRUN}; use --procs for torchrun's --nproc_per_node. "
            "Type: ddp run train.py --procs 2 -- --y",
        ),
        (
            "run torchrun --nproc_per_node 2 -m pkg.mod",
            f"ddp run: torchrun: {TORCHRUN}; use --procs for torchrun's --nproc_per_node. "
            "Type: ddp run -m pkg.mod --procs 2",
        ),
        (
            "run -m pkg.mod --nproc_per_node 2 --epochs 3",
            "ddp run: use --procs for torchrun's --nproc_per_node. Type: ddp run -m pkg.mod --procs 2 -- --epochs 3",
        ),
        (
            "submit train.py --nproc_per_node 8",
            "ddp submit: use --procs for torchrun's --nproc_per_node. Type: ddp submit train.py --procs 8",
        ),
        (
            "init train.py --nproc_per_node 8",
            "ddp init: use --gpus for torchrun's --nproc_per_node. Type: ddp init train.py --gpus 8",
        ),
        (
            "drill train.py --kill 0 --nproc_per_node 2",
            "ddp drill: use --procs for torchrun's --nproc_per_node. Type: ddp drill train.py --kill 0 --procs 2",
        ),
    ],
)
def test_torchrun_command_line_prints_ddp_command_line(
    typed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    assert capsys.readouterr().err.strip() == message


def test_python_of_the_pods_is_no_launcher() -> None:
    assert explain_torchrun("run", ["--python", "/opt/python3.12", "train.py"], [], []) == ""
