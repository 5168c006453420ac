"""``spec.profileRef``: the name of the profile that completes a spec."""

from typing import Annotated, Final, Literal

from msgspec import Meta

from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.other_kinds import CLUSTER_PROFILE_KIND, PROFILE_KIND
from ddp_operator.api.schema import Completion, OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.features.profiles.values import merge_profile, profile_reference, read_profile


class ProfileRef(SpecFields, frozen=True, kw_only=True):
    """Reference to a profile: the values of fields that the job does not set."""

    kind: Annotated[
        Literal["ClusterDDPTrainingProfile", "DDPTrainingProfile"] | None,
        Meta(
            description="ClusterDDPTrainingProfile: for all namespaces. DDPTrainingProfile: of the job's "
            "namespace. Unset: ClusterDDPTrainingProfile."
        ),
    ] = None
    name: Annotated[str, Meta(description="Name of the profile.")]


class ProfileFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    profile_ref: Annotated[
        ProfileRef | None,
        Meta(description="Profile that completes this spec, copied when the job starts (docs/profiles.md)."),
    ] = None


FIELDS: Final = OwnFields(
    "profiles",
    ProfileFields,
    rules=(
        CelRule(
            "spec.profileRef.name",
            "self.matches('^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$')",
            "must consist of lower-case letters, digits, '-' and '.'; change it",
        ),
    ),
    fixed_once="started",
    completion=Completion(
        kinds=(PROFILE_KIND, CLUSTER_PROFILE_KIND),
        remedy="name a profile that has it in spec.profileRef",
        refer=profile_reference,
        read=read_profile,
        merge=merge_profile,
    ),
)
