"""``spec.inputs``: a Job without GPUs fetches data and models before the training pods are created (ADR 0029)."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parts import CheckedTemplate, PodAddition
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import Spec
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.state import Decision, State
from ddp_operator.features.inputs.fetching import fetch_inputs
from ddp_operator.features.inputs.fields import FORMER, Input, InputFields, check_inputs
from ddp_operator.features.inputs.manifests import build_addition, build_fetch_job_spec


def read_inputs(spec: Spec) -> tuple[Input, ...]:
    """Return the inputs of a spec."""
    return FIELDS.read(spec).inputs or ()


def _check(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    return check_inputs(job, read_inputs(job.spec), trainer)


def _add(job: DDPTrainingJob, template: CheckedTemplate, attempt: int) -> PodAddition:
    return build_addition(read_inputs(job.spec), template)


def _build_job(job: DDPTrainingJob, template: CheckedTemplate, launcher_digest: str) -> dict[str, Any]:
    return build_fetch_job_spec(job, read_inputs(job.spec), template, launcher_digest)


def _prepare(state: State, progress_interval: float) -> Decision | None:
    return fetch_inputs(state, read_inputs(state.spec), progress_interval)


FIELDS: Final = OwnFields(
    "inputs",
    InputFields,
    fixed_once="started",
    check=_check,
    pod=_add,
    prepare=_build_job,
    former=(FORMER,),
)
FEATURE: Final = Feature(FIELDS.feature, maturity="stable", page="your-code.md", fields=FIELDS, prepare=_prepare)
