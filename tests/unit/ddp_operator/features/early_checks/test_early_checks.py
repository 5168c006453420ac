"""Refusals of what an API server or the pods would refuse later."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api import constants
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import early_checks
from ddp_operator.features.early_checks import FEATURE, log_patterns
from ddp_operator.manifests.template import MAX_TEXT, resolve_template
from tests.support.builders import job, resource, template, trainer
from tests.support.fake_cluster import ReconcilerHarness


def refusal(made: Any, **spec: Any) -> list[str]:
    with pytest.raises(InvalidManifest) as refused:
        resolve_template(job(template=made, **spec))
    return [str(error) for error in refused.value.errors]


def test_another_mistake_is_reported_beside_that_of_the_command() -> None:
    made = template(trainer(command=["torchrun", "--nnodes=2", "train.py"]))
    messages = refusal(made, metrics={"logPatterns": ["(?P<loss>"]})
    assert any("logPatterns" in message for message in messages)
    assert any("--nnodes" in message for message in messages)


def test_fault_of_the_checks_lets_jobs_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(early_checks, "check_template", fail)
    assert resolve_template(job(template=template())).trainer_index == 0


class TestLogPatterns:
    def test_bad_expression_is_refused_by_its_place(self) -> None:
        [message] = refusal(template(), metrics={"logPatterns": ["(?P<step>.)", "(?P<loss>"]})
        assert message.startswith(
            'spec.metrics.logPatterns[1]: Invalid value: "(?P<loss>": is not a valid Python regular expression '
        )

    @pytest.mark.parametrize("flag", ["--tee=3", "-r3"])
    def test_torchrun_output_redirection_is_refused(self, flag: str) -> None:
        made = template(trainer(command=["torchrun", flag, "train.py"]))
        [message] = refusal(made, metrics={"logPatterns": ["(?P<step>.)"]})
        assert message.startswith("spec.metrics.logPatterns: has no effect, because torchrun's --")
        assert message.endswith("redirects the output; remove one of the two")

    @pytest.mark.parametrize(
        "patterns",
        [
            ["(?i)(?P<step>[\0-\uffff])"],
            [r"(?P<step>[\u0100-\uffff])"],
            [r"(?P<step>\N{EM DASH})"],
            ["(?P<step>" + "[a]" * 17 + ")"],
            ["(?P<step>" + "a" * 490 + ")"] * 3,
        ],
        ids=["beyond ASCII", "escaped", "by name", "classes", "length"],
    )
    def test_expensive_log_patterns_are_checked_in_pod(
        self, patterns: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiled: list[str] = []
        log_patterns._compile_pattern.cache_clear()
        monkeypatch.setattr(log_patterns, "compile_log_pattern", compiled.append)
        assert list(log_patterns.find_invalid_patterns(patterns)) == []
        assert compiled == patterns[:1] * (len(patterns) > 1)
        log_patterns._compile_pattern.cache_clear()


@pytest.mark.parametrize("context", [{"privileged": True}, {"capabilities": {"add": ["CAP_SYS_ADMIN"]}}])
def test_contradiction_of_privileges_is_refused(context: dict[str, Any]) -> None:
    [message] = refusal(template(trainer(securityContext=context | {"allowPrivilegeEscalation": False})))
    assert "allowPrivilegeEscalation: must not be false beside privileged or the capability CAP_SYS_ADMIN" in message


async def test_refusal_by_annotation_ends_with_annotation() -> None:
    harness = ReconcilerHarness(resource(annotations={constants.KUEUE_MIN_PARALLELISM: "1"}), Hooks([FEATURE]))
    await harness.settle()
    assert harness.state("Accepted") == ("False", "InvalidSpec")
    assert harness.raw is not None
    harness.cluster.store.change(harness.raw, meta={"annotations": {}})
    await harness.settle()
    assert harness.jobs() == ["train-1"]


@pytest.mark.parametrize("fewest", ["1", "many", "3", "9" * 5000], ids=["1", "many", "3", "5000 digits"])
def test_kueue_min_parallelism_without_elastic_job_is_refused(fewest: str) -> None:
    few = {"kueue.x-k8s.io/job-min-parallelism": fewest}
    [words] = refusal(template(), annotations=few, nodes=4)
    assert words.startswith("metadata.annotations[kueue.x-k8s.io/job-min-parallelism]: Invalid value:")
    assert "needs an elastic job" in words
    elastic = {"minNodes": 2, "maxNodes": 4}
    if fewest == "3":
        assert resolve_template(job(annotations=few, nodes=4, elastic=elastic))
    else:
        [words] = refusal(template(), annotations=few, nodes=4, elastic=elastic)
        assert "must be at least spec.elastic.minNodes (2)" in words


class TestLength:
    """Linux starts no program with a longer argument or variable."""

    @pytest.mark.parametrize("part", ["command", "args"])
    def test_longest_argument_is_accepted_and_longer_one_refused(self, part: str) -> None:
        longest = "x" * MAX_TEXT
        assert resolve_template(job(template=template(trainer(**{part: ["python", "a.py", longest]}))))
        [message] = refusal(template(trainer(**{part: ["python", "a.py", longest + "x"]})))
        assert message.startswith(
            f"spec.template.spec.containers[0].{part}[2]: has 131,072 bytes, and Linux allows 131,071 for one "
            "argument; put it into a file: use `ddp submit --workdir`, mount a ConfigMap"
        )

    def test_longest_variable_is_accepted_and_longer_one_refused(self) -> None:
        longest = {"name": "A", "value": "é" * ((MAX_TEXT - 2) // 2)}
        assert resolve_template(job(template=template(trainer(env=[longest]))))
        sidecar = {"name": "b", "image": "x", "env": [{"name": "AB", "value": longest["value"] + "x"}]}
        [message] = refusal(template(initContainers=[sidecar]))
        assert message.startswith("spec.template.spec.initContainers[0].env[0].value: has 131,072 bytes, and Linux")


class TestReserved:
    @pytest.mark.parametrize(
        ("made", "words"),
        [
            (template(subdomain="x"), "is set by the operator; remove it"),
            (template(hostname="x"), "is set by the Job controller; remove it"),
            (template(activeDeadlineSeconds=3), "set spec.activeDeadlineSeconds instead"),
            (
                template(restartPolicy="OnFailure"),
                "must be Never, because spec.recovery configures restarts; remove it",
            ),
            (template(volumes=[{"name": "ddp-shm"}]), "is reserved for the operator; choose another"),
            (
                template(trainer(volumeMounts=[{"mountPath": "/opt/ddp-operator/"}])),
                "is reserved for the operator; choose another",
            ),
            (template(trainer(ports=[{"containerPort": 29400}])), "is the port of spec.rendezvous.port"),
            (template(trainer(ports=[{"containerPort": 9400}])), "is the port of spec.metrics.port"),
            (template(trainer(ports=[{"containerPort": 1, "name": "metrics"}])), "is the name of a port"),
            (
                template(initContainers=[{"name": "a", "ports": [{"containerPort": 9400}]}]),
                "is the port of spec.metrics",
            ),
        ],
    )
    def test_operator_owned_fields_are_refused(self, made: Any, words: str) -> None:
        [message] = refusal(made)
        assert words in message

    def test_mount_at_checkpoint_path_is_refused(self) -> None:
        made = template(trainer(volumeMounts=[{"name": "v", "mountPath": "/ckpt/"}]), volumes=[{"name": "v"}])
        [message] = refusal(made, checkpoint={"path": "/ckpt", "claimName": "c"})
        assert "spec.checkpoint.claimName is mounted there" in message
        assert resolve_template(job(template=made, checkpoint={"path": "/ckpt"}))
