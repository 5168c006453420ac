"""Refused fields of a pod template, and the meaning of the others."""

from typing import Any

import pytest

from ddp_cli.local.container import expand
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.manifests.children import build_children
from ddp_operator.manifests.template import MAX_TEXT, resolve_template
from ddp_pod.contract.plan import decode_plan
from tests.support.builders import job, template, trainer

GPUS = {"limits": {"nvidia.com/gpu": "4"}}
CLAIM = {"claims": [{"name": "gpus"}]}
SIDECAR = {"name": "logs", "image": "x"}


def refusal(made: Any, **spec: Any) -> list[str]:
    with pytest.raises(InvalidManifest) as refused:
        resolve_template(job(template=made, **spec))
    return [str(error) for error in refused.value.errors]


def test_dollar_signs_of_log_patterns_reach_launcher() -> None:
    pattern = r"step (?P<step>\d+)$(?P<loss>)"
    *_, child = build_children(job(metrics={"logPatterns": [pattern]}), attempt=1, nodes=1)
    env = {item["name"]: item.get("value") for item in child["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert decode_plan(expand(env["DDP_LAUNCHER_CONFIG"], {"P": "no"})).log_patterns == (pattern,)


class TestTrainer:
    def test_trainer_beside_other_container_is_refused_with_remedy(self) -> None:
        [message] = refusal(template(SIDECAR, trainer()))
        assert message == (
            'spec.template.spec.containers[0]: container "logs" would keep the job running after the trainer has '
            "ended; move it to initContainers with restartPolicy: Always (a native sidecar)"
        )


class TestShape:
    @pytest.mark.parametrize(
        ("made", "path"),
        [
            ({}, "spec.template.spec"),
            ({"spec": []}, "spec.template.spec"),
            ({"spec": {}}, "spec.template.spec.containers"),
            ({"spec": {"containers": {}}}, "spec.template.spec.containers"),
            ({"spec": {"containers": []}}, "spec.template.spec.containers"),
            (template(3), "spec.template.spec.containers[0]"),  # type: ignore[arg-type]
            (template(trainer(name=None)), "spec.template.spec.containers[0].name"),
            (template(trainer(name="")), "spec.template.spec.containers[0].name"),
            (template(trainer(image=None)), "spec.template.spec.containers[0].image"),
            (template(trainer(command="python x.py")), "spec.template.spec.containers[0].command"),
            (template(trainer(args=[1])), "spec.template.spec.containers[0].args"),
            (template(trainer(env={"A": "b"})), "spec.template.spec.containers[0].env"),
            (template(trainer(env=[{"value": "b"}])), "spec.template.spec.containers[0].env[0].name"),
            (template(trainer(ports=["80"])), "spec.template.spec.containers[0].ports"),
            (template(trainer(volumeMounts=[{}])), "spec.template.spec.containers[0].volumeMounts[0].mountPath"),
            (template(trainer(resources=[1])), "spec.template.spec.containers[0].resources"),
            (template(trainer(resources={"limits": [1]})), "spec.template.spec.containers[0].resources.limits"),
            (template(trainer(securityContext="x")), "spec.template.spec.containers[0].securityContext"),
            (
                template(trainer(securityContext={"capabilities": "ALL"})),
                "spec.template.spec.containers[0].securityContext.capabilities",
            ),
            (
                template(trainer(securityContext={"capabilities": {"add": "ALL"}})),
                "spec.template.spec.containers[0].securityContext.capabilities.add",
            ),
            (template(initContainers="x"), "spec.template.spec.initContainers"),
            (template(initContainers=[{}]), "spec.template.spec.initContainers[0].name"),
            (template(volumes="x"), "spec.template.spec.volumes"),
            (template(volumes=[{}]), "spec.template.spec.volumes[0].name"),
            (template(tolerations=["x"]), "spec.template.spec.tolerations"),
            (template(nodeSelector=["x"]), "spec.template.spec.nodeSelector"),
            (template(securityContext=["x"]), "spec.template.spec.securityContext"),
            (template(metadata=[1]), "spec.template.metadata"),
            (template(metadata={"labels": {"a": 1}}), "spec.template.metadata.labels"),
            (template(metadata={"annotations": "x"}), "spec.template.metadata.annotations"),
        ],
    )
    def test_wrong_type_is_refused_by_path(self, made: Any, path: str) -> None:
        assert path in {message.split(": ")[0] for message in refusal(made)}

    @pytest.mark.parametrize(
        "made",
        [
            template(metadata={"labels": None, "annotations": None}),
            template(metadata={}),
            template(
                trainer(env=None, ports=None, resources=None), volumes=None, initContainers=None, securityContext=None
            ),
            template({**trainer(), "env": None, "ports": None, "resources": None, "securityContext": None}),
            template({**trainer(), "volumeMounts": None, "args": None}),
        ],
    )
    def test_null_equals_omitted_field(self, made: Any) -> None:
        assert build_children(job(template=made), attempt=1, nodes=1)


def test_own_variable_that_becomes_too_long_is_refused() -> None:
    prefix = "$" * (MAX_TEXT // 2)  # each $ is doubled
    made = job(template=template(trainer(command=["torchrun", f"--log-dir={prefix}", "a.py"])))
    with pytest.raises(InvalidManifest, match=r"variable DDP_LAUNCHER_CONFIG would have 1.* allows 131,071"):
        build_children(made, attempt=1, nodes=1)


def test_refusal_has_the_first_of_very_many_errors() -> None:
    variables = [{"name": "RANK", "value": "1"}] * 1000
    *messages, last = refusal(template(trainer(env=variables)))
    assert (len(messages), last) == (100, "and 900 further errors")


class TestReserved:
    @pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "PET_NNODES", "DDP_RUN_ID", "TORCHELASTIC_RUN_ID"])
    def test_reserved_variable_is_refused(self, name: str) -> None:
        [message] = refusal(template(trainer(env=[{"name": "OK"}, {"name": name, "value": "x"}])))
        assert message == (
            f'spec.template.spec.containers[0].env[1].name: Invalid value: "{name}": '
            "is reserved: torchrun and the operator set it; remove it"
        )

    @pytest.mark.parametrize("name", ["NCCL_DEBUG", "OMP_NUM_THREADS", "PETS", "PYTHONUNBUFFERED"])
    def test_variable_of_users_own(self, name: str) -> None:
        assert resolve_template(job(template=template(trainer(env=[{"name": name, "value": "1"}]))))

    def test_label_of_operator_is_refused(self) -> None:
        [message] = refusal(template(metadata={"labels": {"ddp-operator.dev/job-name": "x"}}))
        assert "is set by the operator; remove it" in message


class TestTemplateCommand:
    def test_all_problems_are_reported_together(self) -> None:
        made = template(trainer(command=None, image=None, env=[{"name": "RANK"}]))
        assert len(refusal(made)) == 3


class TestProcesses:
    @pytest.mark.parametrize(
        ("asked", "resources", "count"),
        [
            ("auto", None, 1),
            ("auto", {"limits": {"cpu": "8"}}, 1),
            ("auto", GPUS, 4),
            ("gpu", GPUS, 4),
            ("cpu", {"limits": {"cpu": "3500m"}}, 3),
            (2, GPUS, 2),
            (4, GPUS, 4),
            (7, None, 7),
            (7, CLAIM, 7),
            ("auto", {**GPUS, **CLAIM}, 4),
            (8, {**GPUS, **CLAIM}, 8),
        ],
    )
    def test_workers_of_pod_follow_from_its_resources(self, asked: Any, resources: Any, count: int) -> None:
        made = template(trainer(resources=resources))
        assert resolve_template(job(template=made, procPerNode=asked)).nproc == count

    @pytest.mark.parametrize(
        ("asked", "resources", "words"),
        [
            ("gpu", None, "needs a GPU in"),
            (
                "cpu",
                GPUS,
                "would leave the 4 GPUs in spec.template.spec.containers[0].resources idle; use gpu or remove them",
            ),
            ("cpu", None, "needs at least one CPU in"),
            ("cpu", {"limits": {"cpu": "500m"}}, "needs at least one CPU in"),
            (5, GPUS, "is more than the 4 GPUs in"),
            ("auto", CLAIM, "set procPerNode to the number of GPUs that each pod claims"),
            ("gpu", CLAIM, "set procPerNode to the number of GPUs that each pod claims"),
        ],
    )
    def test_processes_beyond_limits_are_refused(self, asked: Any, resources: Any, words: str) -> None:
        [message] = refusal(template(trainer(resources=resources)), procPerNode=asked)
        assert message.startswith("spec.procPerNode: Invalid value: ")
        assert words in message
