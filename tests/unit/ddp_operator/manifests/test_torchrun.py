"""The accepted forms of a training command, and the flags of torchrun in it."""

from __future__ import annotations

import pytest

from ddp_operator.manifests.torchrun import InvalidCommand, UserCommand, split_user_command
from ddp_pod.contract.plan import TorchrunOptions


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["python", "train.py", "--lr", "1"], UserCommand("python", ("train.py", "--lr", "1"))),
        (
            ["python3.11", "-u", "-W", "ignore", "train.py"],
            UserCommand("python3.11", ("-u", "-W", "ignore", "train.py")),
        ),
        (["/opt/conda/bin/python", "train.py"], UserCommand("/opt/conda/bin/python", ("train.py",))),
        (["python", "-m", "pkg.train", "-m", "x"], UserCommand("python", ("-m", "pkg.train", "-m", "x"))),
        (["python", "-c", "print(1)"], UserCommand("python", ("-c", "print(1)"))),
        (["train.py", "--nnodes=3"], UserCommand("python3", ("train.py", "--nnodes=3"))),
        (["-m", "pkg.train"], UserCommand("python3", ("-m", "pkg.train"))),
        (["torchrun", "train.py", "--nnodes", "3"], UserCommand("python3", ("train.py", "--nnodes", "3"))),
        (["torchrun", "-m", "pkg.train", "x"], UserCommand("python3", ("-m", "pkg.train", "x"))),
        (["torchrun", "--module", "pkg.train"], UserCommand("python3", ("-m", "pkg.train"))),
        (["torchrun", "--", "train.py"], UserCommand("python3", ("train.py",))),
        (["/opt/conda/bin/torchrun", "train.py"], UserCommand("/opt/conda/bin/python3", ("train.py",))),
        (
            ["torchrun", "--log_dir", "/logs", "--tee=3", "-r", "0:1", "--virtual-local-rank", "train.py", "--tee"],
            UserCommand(
                "python3",
                ("train.py", "--tee"),
                options=TorchrunOptions(log_dir="/logs", tee="3", redirects="0:1", virtual_local_rank=True),
            ),
        ),
        (
            ["torchrun", "--monitor=0.5", "-t3", "train.py"],
            UserCommand("python3", ("train.py",), options=TorchrunOptions(monitor_interval=0.5, tee="3")),
        ),
        (
            ["python", "-O", "-m", "torch.distributed.run", "--role=x", "--role=y", "train.py"],
            UserCommand("python", ("-O", "train.py"), options=TorchrunOptions(role="y")),
        ),
        (
            ["python", "-m", "torch.distributed.launch", "train.py", "x"],
            UserCommand("python", ("train.py", "--local-rank=${local_rank}", "x")),
        ),
        (
            ["python", "-m", "torch.distributed.launch", "--use_env", "train.py"],
            UserCommand("python", ("train.py",)),
        ),
        (["bash", "-c", "python train.py"], UserCommand("python3", ("bash", "-c", "python train.py"), program=True)),
        (["./train.sh"], UserCommand("python3", ("./train.sh",), program=True)),
        (["accelerate", "launch", "x.py"], UserCommand("python3", ("accelerate", "launch", "x.py"), program=True)),
    ],
)
def test_forms_of_training_command(line: list[str], expected: UserCommand) -> None:
    assert split_user_command(line, []) == expected
    assert split_user_command(line[:1], line[1:]) == expected
    assert split_user_command([], line) == expected


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--nnodes=2", "--nnodes: set spec.nodes instead"),
        ("--nnode=2", "--nnodes: set spec.nodes instead"),
        ("--nproc_per_node=2", "--nproc-per-node: set spec.procPerNode instead"),
        ("--nproc-per-node", "--nproc-per-node: set spec.procPerNode instead"),
        ("--rdzv-backend=c10d", "--rdzv-backend: set spec.rendezvous.backend instead"),
        ("--rdzv_endpoint=a:1", "--rdzv-endpoint: set spec.rendezvous.port instead"),
        ("--rdzv-id=1", "--rdzv-id: remove it"),
        ("--rdzv-conf=x=1", "--rdzv-conf: set spec.rendezvous.joinTimeoutSeconds instead"),
        ("--rdzv=1", "--rdzv-backend: set"),
        ("--standalone", "--standalone: set spec.nodes to 1 instead"),
        ("--max_restarts=3", "--max-restarts: set spec.recovery.inPlaceRestarts instead"),
        ("--node-rank=0", "--node-rank: remove it"),
        ("--master_addr=a", "--master-addr: remove it"),
        ("--master-port=1", "--master-port: set spec.rendezvous.port instead"),
        ("--local-addr=a", "--local-addr: remove it"),
        ("--no-python", "--no-python: write the program itself"),
        ("--run-path", "--run-path: write the script itself"),
        ("--shutdown-timeout=3", "--shutdown-timeout: set spec.checkpoint.graceSeconds instead"),
        ("--signals-to-handle=SIGTERM", "--signals-to-handle: remove it"),
        ("--no-such-flag", "--no-such-flag: is not a flag of torchrun"),
        ("-x", "-x: is not a flag of torchrun"),
        ("--help", "--help: starts no training"),
        ("--duplicate=1", "--duplicate: is ambiguous in torchrun: --duplicate-stdout-filters, --duplicate-stderr"),
    ],
)
def test_torchrun_flag_of_operator_is_refused_by_name(flag: str, remedy: str) -> None:
    for line in (["torchrun", flag, "train.py"], ["python", "-m", "torch.distributed.run", flag, "train.py"]):
        with pytest.raises(InvalidCommand) as raised:
            split_user_command(line, [])
        assert str(raised.value).startswith(remedy)


def test_all_of_operators_flags_are_named_at_once() -> None:
    line = "torchrun --nnodes=2 --node_rank 0 --standalone --tee 3 --nproc_per_node 8 --nnodes 2 train.py --nnodes 5"
    with pytest.raises(InvalidCommand) as raised:
        split_user_command(line.split(), [])
    assert str(raised.value) == (
        "--nnodes: set spec.nodes instead; --node-rank: remove it; the completion index of the pod is its node rank; "
        "--standalone: set spec.nodes to 1 instead; --nproc-per-node: set spec.procPerNode instead"
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ([], "has neither command nor args"),
        ([""], "has an empty first item"),
        (["python"], "python: names no script"),
        (["python", "-u"], "python: names no script"),
        (["python", "-"], "reads the script from standard input"),
        (["python", "-m"], "-m needs a value"),
        (["--lr", "1"], "starts with the flag --lr"),
        (["torchrun"], "torchrun has no script"),
        (["torchrun", "--tee"], "--tee: requires argument"),
        (["torchrun", "-t"], "--tee: requires argument"),
        (["torchrun", "--virtual-local-rank=1", "x.py"], "--virtual-local-rank: must not have an argument"),
        (["torchrun", "--monitor-interval=soon", "x.py"], "--monitor-interval: 'soon' is no number"),
        (["torchrun", "--monitor-interval=0", "x.py"], "--monitor-interval: '0' is no number"),
    ],
)
def test_unrunnable_command_is_refused(line: list[str], complaint: str) -> None:
    with pytest.raises(InvalidCommand, match=complaint):
        split_user_command(line, [])


def test_torchrun_itself_has_each_option() -> None:
    run = pytest.importorskip("torch.distributed.run")
    known = vars(run.get_args_parser().parse_args(["train.py"]))
    assert set(vars(TorchrunOptions())) <= set(known)


def refusal(line: list[str]) -> str:
    try:
        split_user_command(line, [])
    except InvalidCommand as error:
        return str(error)
    return ""


def test_no_flag_of_torchrun_is_unknown_to_us() -> None:
    run = pytest.importorskip("torch.distributed.run")
    actions = run.get_args_parser()._actions
    flags = [(flag, action.nargs != 0) for action in actions for flag in action.option_strings]
    unknown = [flag for flag, value in flags if "is no flag" in refusal(["torchrun", flag, *["0"] * value, "train.py"])]
    assert len(flags) > 50
    assert unknown == []


TEE = "python train.py 2>&1 | tee log"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["bash", "-c", TEE], ["bash", "-o", "pipefail", "-c", TEE]),
        (["/bin/zsh", "-lc", TEE], ["/bin/zsh", "-o", "pipefail", "-lc", TEE]),
        *(
            (["bash", "-c", text], ["bash", "-o", "pipefail", "-c", text])
            for text in (
                f"set -ex\ncd /app\n{TEE}\n",
                f"cd /app && {TEE};",
                "python train.py |\n tee log",
                "python train.py |& tee log",
                "python train.py 2>&1 | grep -v warn | tee log",
            )
        ),
        *(
            (line, line)
            for line in (
                ["sh", "-c", TEE],
                ["bash", "train.sh"],
                ["bash", "-c", "python train.py"],
                ["bash", "-c", "python train.py || true"],
                ["bash", "-c", f"{TEE}; exit ${{PIPESTATUS[0]}}"],
                ["bash", "-c", "if nvidia-smi | grep -q A100; then python a.py; fi"],
                ["bash", "-c", "nvidia-smi | head -3; python train.py"],
                ["bash", "-c", "a | b && python train.py"],
                ["bash", "-c", f"a | b && {TEE}"],
                ["bash", "-c"],
                ["tee", "|", "bash"],
            )
        ),
    ],
)
def test_shell_whose_only_pipes_are_its_last_command_runs_with_pipefail(line: list[str], expected: list[str]) -> None:
    assert list(split_user_command(line, []).argv) == expected


def test_long_shell_text_is_read_in_linear_time() -> None:
    for text in ("|" * 10**6, "a|" * 10**6 + ";a", " " * 10**6 + ";|", "a" * 10**6 + "|&" + " " * 10**6 + ";a"):
        split_user_command(["bash", "-c", text], [])
