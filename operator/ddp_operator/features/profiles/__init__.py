"""Profiles: what a platform team writes for jobs, below a job's own values, and the operator's defaults below those.

ADR 0032 and 0034 have the reasons.
"""

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.decide.hooks import Feature, Service
from ddp_operator.features.profiles.definitions import build_definitions
from ddp_operator.features.profiles.fields import FIELDS

if TYPE_CHECKING:  # of the operator's process, which `ddp run` does not have
    from ddp_operator.kube.services import ServiceContext


class ProfileSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of this feature."""

    job_defaults: Annotated[
        dict[str, Any],
        Meta(description="defaults of networkPolicy, securityProfile and history, as part of a spec in JSON"),
    ] = {}


def _start(context: "ServiceContext") -> Service:
    """Return the service. Raises: InvalidManifest, which names the setting."""
    from ddp_operator.features.profiles.defaults import read_job_defaults
    from ddp_operator.features.profiles.service import Profiles, read_by

    settings = context.settings if isinstance(context.settings, ProfileSettings) else ProfileSettings()
    try:
        defaults = read_job_defaults(settings.job_defaults, context.schema)
    except InvalidManifest as error:
        raise InvalidManifest([FieldError("DDP_OPERATOR_JOB_DEFAULTS", str(error))]) from None
    return Profiles(read_by(context.client), defaults)


FEATURE: Final = Feature(
    FIELDS.feature,
    maturity="stable",
    page="profiles.md",
    fields=FIELDS,
    definitions=build_definitions,
    settings=ProfileSettings,
    start=_start,
)
