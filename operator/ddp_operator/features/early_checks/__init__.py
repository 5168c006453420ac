"""Refuse a job at once for what an API server or its pods would refuse later, each with its field and the remedy.

The kernel checks the fields on which its manifests depend (``manifests/template``), and works without this.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ddp_operator.api import constants
from ddp_operator.api.cluster import Object
from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.pod_fields import POD, explain_unknown_fields, find_unknown_fields
from ddp_operator.api.posting import Posting
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.decide.hooks import Feature
from ddp_operator.features.early_checks.containers import check_containers
from ddp_operator.features.early_checks.log_patterns import check_log_patterns
from ddp_operator.features.early_checks.template import check_template
from ddp_pod.contract.numbers import parse_count


class NoFields(SpecFields, frozen=True, kw_only=True):
    """This feature has no part of its own in the spec."""


def check(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Yield the refusals of a job."""
    yield from check_template(job, pod, trainer)
    yield from check_containers(pod, POD)
    if not trainer.get("command") and not trainer.get("args"):
        # They may be missing because of a misspelled field: the API server stores unknown template fields.
        yield from find_unknown_fields(pod)
    yield from check_log_patterns(job.spec.metrics.log_patterns, trainer)
    yield from _check_min_parallelism(job)


def _check_min_parallelism(job: DDPTrainingJob) -> Iterator[FieldError]:
    """Check Kueue's annotation for partial admission: torchrun cannot start with fewer nodes than its minimum."""
    annotation = job.annotations.get(constants.KUEUE_MIN_PARALLELISM)
    if annotation is None:
        return
    path = f"metadata.annotations[{constants.KUEUE_MIN_PARALLELISM}]"
    elastic = job.spec.elastic
    nodes = parse_count(annotation)
    if elastic is None:
        message = "needs an elastic job, because torchrun waits for all nodes otherwise; set spec.elastic or remove it"
        yield FieldError(path, message, annotation)
    elif nodes is None or nodes < elastic.min_nodes:
        message = (
            f"must be at least spec.elastic.minNodes ({elastic.min_nodes}), because torchrun waits for that number of "
            "nodes; change or remove it"
        )
        yield FieldError(path, message, annotation)


def _explain_refusal(manifest: Object, message: str) -> str:
    return explain_unknown_fields(message)


FIELDS: Final = OwnFields("early_checks", NoFields, check=check)
FEATURE: Final = Feature(
    FIELDS.feature,
    maturity="stable",
    page="reference.md",
    fields=FIELDS,
    posting=Posting(explain_refusal=_explain_refusal),
)
