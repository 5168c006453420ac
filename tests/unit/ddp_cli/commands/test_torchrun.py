"""`ddp` translates a command line of torchrun."""

import pytest

from ddp_cli.__main__ import main
from ddp_cli.commands.torchrun import explain_torchrun

TORCHRUN = "ddp starts the script with torchrun itself; name only the script"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("run train.py --nproc_per_node 2", "use --procs for torchrun's --nproc_per_node."),
        (
            "run train.py --nproc-per-node=gpu --nnodes=1:4 --rdzv_backend c10d --epochs 3",
            "use --procs for torchrun's --nproc-per-node; use --nodes for torchrun's --nnodes; "
            "leave out torchrun's --rdzv_backend.",
        ),
        (
            "run --cpu torchrun --standalone --nproc_per_node=2 train.py --nnodes 7 --lr 1",
            f"torchrun: {TORCHRUN}; leave out torchrun's --standalone; use --procs for torchrun's --nproc_per_node.",
        ),
        ("run torchrun", f"torchrun: {TORCHRUN}."),
        ("run python train.py --x 1", f"python: {TORCHRUN}."),
        ("run -m torch.distributed.run train.py -- --y", f"-m torch.distributed.run: {TORCHRUN}."),
        ("run torchrun -m pkg.mod", f"torchrun: {TORCHRUN}."),
        ("init train.py --nproc_per_node 8", "use --procs for torchrun's --nproc_per_node."),
        ("submit train.py --max_restarts 8", "leave out torchrun's --max_restarts."),
    ],
)
def test_torchrun_and_its_flags_are_replaced_by_those_of_ddp(
    typed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    assert capsys.readouterr().err.startswith(f"ddp {typed.split()[0]}: {message} Arguments of the script follow --")


def test_python_of_the_pods_is_no_launcher() -> None:
    assert explain_torchrun("run", ["--python", "/opt/python3.12", "train.py"], [], []) == ""
