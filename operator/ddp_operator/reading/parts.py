"""What only features read in the report and in the end of a pod, within the limits of the contract. Pure."""

from ddp_operator.decide.failures import Termination
from ddp_operator.decide.report import Page
from ddp_operator.reading.terminations import sanitize_text
from ddp_pod.contract.pod_end import PodEnd
from ddp_pod.contract.records import read_record
from ddp_pod.contract.report import PodReport


def read_report_part(page: Page, name: str) -> PodReport:
    """Return a report with one of its members, which ``name`` is as JSON names it."""
    return read_record(PodReport, {name: page.members.get(name)}, sanitize_text)


def read_end_part(end: Termination, name: str) -> PodEnd:
    """Return the end of a pod with one of its members, which ``name`` is as JSON names it."""
    return read_record(PodEnd, {name: end.members.get(name)}, sanitize_text)
