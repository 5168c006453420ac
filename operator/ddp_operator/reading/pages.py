"""Read the reports of pods. Pure.

A report comes from the user's pod. It is decoded by the schema of ``ddp_pod.contract``, whose fields have limits; no
content raises an exception.
"""

from ddp_operator.decide.report import Page
from ddp_operator.reading.terminations import decode_object, sanitize_text
from ddp_pod.contract.records import read_record
from ddp_pod.contract.run_report import REPORT_LIMIT, RunReport


def decode_report(data: bytes) -> Page:
    """Return a pod's report; what is none, or too large, is an empty one."""
    members = decode_object(data, REPORT_LIMIT)
    return Page(**vars(read_record(RunReport, members, sanitize_text)), members=members or {})
