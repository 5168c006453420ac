"""``spec.code``: the folder that `ddp submit --workdir` packs, unpacked in each pod (ADR 0026)."""

from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import CodeStatus, Status
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.state import State
from ddp_operator.features.code.fields import FIELDS, Code


def record(state: State, status: Status) -> Status:
    """Return the status with the revision of the job's code."""
    code = FIELDS.read(state.spec).code
    if code is None and status.code is None:
        return status
    return replace(status, code=None if code is None else _describe(code))


def _describe(code: Code) -> CodeStatus:
    commit = ""
    if code.commit:
        commit = code.commit[:12] + ("-dirty" if code.dirty else "")
    # Two dirty trees of a commit differ in their digest alone.
    revision = commit if commit and not code.dirty else f"{commit} {code.digest[:12]}".lstrip()
    return CodeStatus(revision=revision)


FEATURE: Final = Feature(FIELDS.feature, maturity="stable", page="your-code.md", fields=FIELDS, record=record)
