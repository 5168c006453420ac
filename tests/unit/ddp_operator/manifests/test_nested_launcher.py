"""Launchers in a training command, behind wrappers and in shells."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.manifests.nested_launcher import find_nested_launcher
from ddp_operator.manifests.template import resolve_template
from tests.support.builders import job, template, trainer

WRAPPERS = (
    "env X=1", "env -u A -C /x X=1", "env -i --", "/usr/bin/env", "uv run", "uv run --with x --extra y --",
    "uv --offline run", "conda run -n env --no-capture-output", "micromamba run -p /env", "poetry run", "pipenv run",
    "pdm run", "hatch run", "pixi run -e gpu", "numactl --cpunodebind=0 -m 0", "taskset -c 0-3", "nice -n 10",
    "nice -10 ionice -c2", "stdbuf -oL -e 0", "timeout -k 10 1h", "timeout --signal=INT 5", "time -p", "nohup",
    "nsys profile -o out -t cuda,nvtx --stats=true -f true", "ncu --set full -f -o x", "py-spy record -o x.svg --",
    "strace -f -o x", "/sbin/tini --", "tini -s", "dumb-init", "sudo -E -u user A=1", "gosu user", "su-exec 1000:1000",
    'xvfb-run -a -s "-screen 0"', "catchsegv", "exec", "doppler run --project x --", "singularity exec --nv img.sif",
    "uvx --from torch", "/opt/nvidia/nvidia_entrypoint.sh", "chronic flock /tmp/lock",
)  # fmt: skip
LAUNCHERS = {
    "torchrun --nproc_per_node=2 train.py --config x": "python3 train.py --config x",
    "torchrun --standalone --nproc-per-node 2 -m pkg.train -f x": "python3 -m pkg.train -f x",
    "torchrun --nproc_per=2 -r3 --tee 3 --no-python ./run --nnodes 2": "./run --nnodes 2",
    "torchrun --nnodes=1 --node_rank=0 --master_addr=localhost train.py": "python3 train.py",
    "torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 train.py": "python3 train.py",
    "python -u -W ignore -m torch.distributed.run --nproc_per_node=2 train.py": "python -u -Wignore train.py",
    "python3.11 -um torch.distributed.launch --use_env train.py": "python3.11 -u train.py",
    "python /opt/conda/bin/torchrun train.py": "python train.py",
    "/opt/conda/bin/torchrun train.py": "/opt/conda/bin/python3 train.py",
    "accelerate launch --mixed_precision bf16 --num_processes=2 x.py --num_machines 2": "python3 x.py --num_machines 2",
    "accelerate-launch --multi_gpu --fsdp_version 2 -m pkg.train": "python3 -m pkg.train",
    "python -m accelerate.commands.launch train.py": "python train.py",
    "python -m accelerate.commands.accelerate_cli launch train.py": "python train.py",
    "deepspeed --num_gpus 2 train.py --deepspeed --hostfile x": "python3 train.py --deepspeed --hostfile x",
    "colossalai run --nproc_per_node 4 train.py": "python3 train.py",
    "composer -n 8 train.py": "python3 train.py",
    "fabric run --devices=2 --accelerator gpu train.py": "python3 train.py",
    "mpirun -np 4 --allow-run-as-root --mca btl tcp -x A python train.py -H x": "python train.py -H x",
    "mpiexec -n 4 python train.py": "python train.py",
    "horovodrun -np 2 python train.py": "python train.py",
    "srun --ntasks=2 --gpus-per-task 1 python train.py": "python train.py",
    "python -m debugpy --listen 0.0.0.0:5678 -m torch.distributed.run --nproc_per_node 2 train.py":
        "python -m debugpy --listen 0.0.0.0:5678 train.py",
    "coverage run --source x -m torch.distributed.run train.py": "coverage run --source x train.py",
    "python -m cProfile -o x /opt/bin/torchrun -m pkg.train": "python -m cProfile -o x -m pkg.train",
    "uv run -m trl.cli sft --config x": "uv run -m trl.scripts.sft --config x",
    "llamafactory-cli train x.yaml": "python3 -m llamafactory.launcher x.yaml",
    "trl sft --config x.yaml": "python3 -m trl.scripts.sft --config x.yaml",
    "axolotl train config.yml": "python3 -m axolotl.cli.train config.yml",
    "direnv exec . ddtrace-run torchrun train.py": "direnv exec . ddtrace-run python3 train.py",
    "python -m trl.cli dpo --model x": "python -m trl.scripts.dpo --model x",
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrapper", "line"),
    [*(("", line) for line in LAUNCHERS), *((wrapper, next(iter(LAUNCHERS))) for wrapper in WRAPPERS)],
)
def test_launcher_behind_wrapper_is_replaced_by_its_script(wrapper: str, line: str) -> None:
    found = find_nested_launcher(shlex.split(f"{wrapper} {line}"))
    assert found is not None
    assert (found.result, found.several_nodes) == (tuple(shlex.split(f"{wrapper} {LAUNCHERS[line]}")), False)
    assert find_nested_launcher(found.result) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torchrun train.py", "python3 train.py"),
        ("cd /app && exec torchrun --standalone train.py", "cd /app && exec python3 train.py"),
        ("pip install x\nOMP=2 torchrun --nnodes=1 \\\n  train.py '$A b'; echo done",
         "pip install x\nOMP=2 python3 train.py '$A b'; echo done"),
        ("N=${N:-1}\ntorchrun --nproc_per_node=$N \"$dir/a b.py\" $ARGS 2>&1 | tee log",
         "N=${N:-1}\npython3 \"$dir/a b.py\" $ARGS 2>&1 | tee log"),
        ("$(which torchrun) a.py && python $(command -v torchrun) b.py",
         "python3 a.py && python $(command -v torchrun) b.py"),
        ("python `which torchrun` --nproc_per_node 2 x.py", "python x.py"),
        ("$CONDA_PREFIX/bin/torchrun train.py", "python3 train.py"),
        ("env A=1 sh -c 'torchrun train.py --f'", "env A=1 sh -c 'python3 train.py --f'"),
        ("eval 'torchrun train.py'", "eval 'python3 train.py'"),
        ("for i in 1 2; do torchrun train.py $i; done", "for i in 1 2; do python3 train.py $i; done"),
        ("cat > a <<END\ntorchrun x.py\nEND\ntime torchrun a", "cat > a <<END\ntorchrun x.py\nEND\ntime python3 a"),
        ("export CONF=is_host=$(if [ $R == 0 ]; then echo true; fi)\ntorchrun --local_addr=$P --rdzv-conf=$C t",
         "export CONF=is_host=$(if [ $R == 0 ]; then echo true; fi)\npython3 t"),
        ("set -e\nif [ -d x ]; then cd x; fi\ndeepspeed a.py", "set -e\nif [ -d x ]; then cd x; fi\npython3 a.py"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "shell", ["bash -c", "/bin/sh -lc", "bash -euxo pipefail -c", "env A=1 bash --login -c", "env -S"]
)
def test_launcher_in_shell_text_is_replaced_in_place(shell: str, text: str, expected: str) -> None:
    found = find_nested_launcher([*shell.split(), text])
    assert found is not None
    assert found.result == (*shell.split(), expected)


@pytest.mark.parametrize(
    "line",
    [
        "bash -c 'torchrun --nnodes=$DDP_NODES --node_rank=$RANK train.py'",
        "bash -c 'torchrun --rdzv-endpoint=x:1 train.py'",
        "bash -c 'PET_NNODES=2 torchrun train.py'",
        "env NNODES=2 llamafactory-cli train x.yaml",
        "accelerate launch --num_machines 2 train.py",
        "accelerate launch --config_file x train.py",
        "deepspeed --hostfile h train.py",
        "mpirun -H a,b train",
        "srun -N 2 python train.py",
    ],
)
def test_launcher_for_several_machines_is_recognised(line: str) -> None:
    found = find_nested_launcher(shlex.split(line))
    assert found is not None
    assert found.several_nodes


def test_number_of_machines_in_variable_of_container_is_considered() -> None:
    for line, name in (("torchrun train.py", "PET_NNODES"), ("llamafactory-cli train x", "NNODES")):
        results = [find_nested_launcher(line.split(), names) for names in ((), (name,), ("X_NNODES",))]
        assert [found is not None and found.several_nodes for found in results] == [False, True, False]


@pytest.mark.parametrize(
    "line",
    [
        "bash -c 'torchrun $FLAGS train.py'",
        "bash -c 'torchrun \"$@\"'",
        "bash -c '$LAUNCHER train.py'",
        "bash -c 'if [ $DEBUG ]; then python train.py; else torchrun train.py; fi'",
        "bash -c '[ -z $RANK ] && torchrun train.py; python train.py'",
        "bash -c 'python train.py || torchrun train.py'",
        "bash -c 'exec python train.py; torchrun train.py'",
        "bash -c 'echo torchrun; python train.py --launcher torchrun'",
        "bash -c '# torchrun train.py\npython train.py'",
        "bash -c 'cat torchrun.log; pip install deepspeed'",
        "bash run.sh torchrun",
        "python train.py torchrun",
        "python -c 'torchrun' -m torch.distributed.run",
        "env A=torchrun python train.py",
        "uv run train.py -- x",
        "torchrun --unknown value train.py",
        "torchrun",
        "accelerate config",
        "accelerate",
        "uv",
        "timeout",
        "env -S",
        "bash -c",
    ],
)
def test_command_without_certain_launcher_is_accepted(line: str) -> None:
    assert find_nested_launcher(shlex.split(line)) is None


def refuse(line: str, variables: Collection[Mapping[str, str]] = (), **spec: int) -> str:
    made = template(trainer(command=shlex.split(line), env=list(variables)))
    try:
        resolve_template(job(template=made, **spec))
    except InvalidManifest as error:
        return str(error)
    return ""


def test_refusal_states_command_and_processes_to_write() -> None:
    message = refuse("env OMP=1 torchrun --nproc_per_node=4 train.py --config x", nodes=2, procPerNode=2)
    assert message.startswith(
        "spec.template.spec.containers[0].command: torchrun would start separate ranks in each of"
    )
    assert "write [env, OMP=1, python3, train.py, --config, x] as the command" in message
    assert "spec.procPerNode: 4" in message
    long = refuse(f"bash -c 'cd {'x' * 200} && torchrun --nproc_per_node=2 train.py'", nodes=2, procPerNode=2)
    assert "write `python3 train.py` instead of `torchrun --nproc_per_node=2 train.py`" in long
    assert "procPerNode:" not in long


def test_launcher_of_several_ranks_in_each_rank_of_pod_is_refused() -> None:
    line = "bash -c 'torchrun --nproc_per_node={} --nnodes=$WORLD_SIZE --node_rank=$RANK train.py'"
    message = refuse(line.format(8), nodes=4, procPerNode=8)
    assert "each of the 8 ranks of a pod would run torchrun, which starts 8 ranks" in message
    assert "write [bash, -c, python3 train.py] as the command" in message
    assert refuse(line.format(1), nodes=4, procPerNode=8) == ""
    assert refuse(line.format(8), nodes=4, procPerNode=1) == ""


SCRIPTS = {
    "run.sh": "#!/bin/bash\nset -e\n. lib/env.sh\nexec torchrun --nproc_per_node=$N train.py ok",
    "all.sh": "bash all.sh; bash run.sh",
    "safe.sh": "python train.py",
}


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("bash run.sh", "run.sh"),
        ("bash -x run.sh --lr 1", "run.sh"),
        ("numactl -N 0 ./run.sh", ""),
        ("run.sh", "run.sh"),
        ("bash -c 'cd x; source run.sh'", "run.sh"),
        ("sh -c '. run.sh'", "run.sh"),
        ("bash all.sh", "run.sh"),
        ("bash safe.sh", ""),
        ("bash missing.sh", ""),
        ("bash", ""),
    ],
)
def test_launcher_in_script_file_is_found(line: str, file: str) -> None:
    found = find_nested_launcher(shlex.split(line), (), SCRIPTS.get)
    assert (found.file if found else "") == file
    if found:
        assert found.result == SCRIPTS["run.sh"].replace("torchrun --nproc_per_node=$N", "python3")
