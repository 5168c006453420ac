"""``DDPTrainingJob.status`` as typed, frozen values.

Numbers with a fraction are strings, as Kubernetes' API conventions ask. Times are typed here and RFC 3339 outside; what
is put in has been through ``timestamps.truncate``, so that it equals what is read back.
"""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

Phase = Literal["Pending", "Rejected", "Suspended", "Running", "Restarting", "Succeeded", "Failed"]
ENDED_PHASES: Final = ("Succeeded", "Failed", "Rejected")
"""Phases that a job does not leave by itself."""
ConditionStatus = Literal["True", "False", "Unknown"]
RecoveryLevel = Literal["SamePods", "ReplacedPod", "NewPods"]
Time = Annotated[datetime, Meta(tz=True)]


class _Fields(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Common behaviour. Unknown fields are tolerated: a newer operator may have written them."""


class Condition(_Fields, frozen=True, kw_only=True):
    """One condition in the form of metav1.Condition."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""
    last_transition_time: Time
    observed_generation: int = 0


class Nodes(_Fields, frozen=True, kw_only=True, omit_defaults=False):
    """Pods of the current attempt."""

    desired: int = 0
    ready: Annotated[int, Meta(description="Pods that run and are ready, without the spares.")] = 0
    spares: Annotated[int, Meta(description="Pods beyond those that are ready too, and wait.")] = 0
    succeeded: int = 0
    failed: int = 0


class Restarts(_Fields, frozen=True, kw_only=True, omit_defaults=False):
    """How often training was interrupted and started again."""

    total: Annotated[int, Meta(description="Restarts of all pods together, counted and free.")] = 0
    counted: Annotated[
        int, Meta(description="Restarts, in the same pods or new ones, that count towards maxRestarts.")
    ] = 0
    free: Annotated[
        int, Meta(description="Those that do not count: after disruptions, a change of spec.nodes, a resumption.")
    ] = 0
    used: Annotated[int, Meta(description="Counted restarts since a checkpoint last reset the count.")] = 0
    without_progress: Annotated[int, Meta(description="Consecutive failures without a new step in between.")] = 0
    step: Annotated[int, Meta(description="Farthest step that was known at the last counted failure.")] = 0
    checkpoint_step: Annotated[int, Meta(description="Step of the checkpoint at the last counted failure.")] = 0
    in_place: Annotated[int, Meta(description="Restarts of the workers in the same pods.")] = 0
    in_place_before: Annotated[int, Meta(description="Restarts in the same pods in earlier attempts.")] = 0
    replaced: Annotated[int, Meta(description="Pods that their Job replaced while training had to wait for them.")] = 0
    all: Annotated[int, Meta(description="All restarts: with new pods, of single pods, and in the same pods.")] = 0


class Progress(_Fields, frozen=True, kw_only=True):
    """Progress as rank 0 last reported it."""

    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    total_steps: int | None = None
    percent: Annotated[str | None, Meta(description="Share of all steps that are done, such as 42.0%.")] = None
    eta: Annotated[str | None, Meta(description="Time left, such as 5m12s.")] = None
    eta_seconds: int | None = None
    loss: str | None = None
    samples_per_second: Annotated[str | None, Meta(description="Over all ranks.")] = None
    steps_per_second: str | None = None
    throughput: Annotated[
        str | None, Meta(description="The rate with its unit: samples/s, or steps/s where samples are not counted.")
    ] = None
    learning_rate: str | None = None
    val_accuracy: str | None = None
    val_loss: str | None = None
    last_step_time: Time | None = None


class SlowestPair(_Fields, frozen=True, kw_only=True):
    """The two pods between which the least goes through."""

    pods: Annotated[tuple[int, ...], Meta(description="Their indices.")]
    nodes: Annotated[tuple[str, ...], Meta(description="The nodes on which they ran.")] = ()
    megabytes_per_second: Annotated[str, Meta(description="In one direction, of all their ranks, in 10^6 bytes.")]


class PreflightStatus(_Fields, frozen=True, kw_only=True):
    """Results of pod 0's checks before training."""

    failed: Annotated[tuple[str, ...], Meta(description="The checks that failed; pod 0's log says why.")] = ()
    dns_milliseconds: str | None = None
    tcp_milliseconds: str | None = None
    all_reduce_milliseconds: Annotated[str | None, Meta(description="For one number, over all ranks.")] = None
    all_reduce_megabytes_per_second: Annotated[
        str | None, Meta(description="Bus bandwidth over all ranks, in 10^6 bytes a second.")
    ] = None
    transport: Annotated[
        str | None,
        Meta(
            description="What carries data between pods, by NCCL's own log: IB, RoCE, EFA, FasTrak, NVLink, Socket, or "
            "the name of another plugin."
        ),
    ] = None
    gpu_direct: Annotated[bool | None, Meta(description="Whether all channels between pods use GPUDirect RDMA.")] = None
    slowest_pair: SlowestPair | None = None


class CheckpointStatus(_Fields, frozen=True, kw_only=True):
    """The newest checkpoint that the training script reported."""

    step: int
    time: Annotated[Time | None, Meta(description="When the operator first saw it.")] = None


class History(_Fields, frozen=True, kw_only=True):
    """The job's figures over time as lines of a CSV file, for `ddp report`: dozens, whatever the job's length."""

    columns: Annotated[
        str, Meta(description="Names of the columns, as in the metrics.csv of `ddp run`; time is Unix's.")
    ]
    rows: Annotated[
        tuple[str, ...],
        Meta(
            description="At most 60; when there are more, every second one goes. A figure that is not known is empty."
        ),
    ]


class TrackingStatus(_Fields, frozen=True, kw_only=True):
    """The job's run in the trackers of spec.tracking."""

    run_id: Annotated[str, Meta(description="Identity of the run: DDP_TRACKING_RUN of the ranks, WANDB_RUN_ID.")]
    links: Annotated[
        tuple[str, ...], Meta(description="Pages of the run that the pods have named: in MLflow, in W&B.")
    ] = ()


class LastRestart(_Fields, frozen=True, kw_only=True):
    """What the latest restart of all workers has cost."""

    attempt: Annotated[int, Meta(description="The attempt that it started, or in which it was.")]
    level: Annotated[
        RecoveryLevel | None,
        Meta(
            description="SamePods: the workers were restarted in their pods. ReplacedPod: so, once a lost pod was "
            "replaced in its Job. NewPods: all pods were, in a new Job."
        ),
    ] = None
    cause: Annotated[
        str, Meta(description="Category of the failure, or why else training was interrupted, such as Resized.")
    ] = ""
    time: Annotated[Time, Meta(description="When training was interrupted.")]
    step: Annotated[int | None, Meta(description="Farthest step that was reported before it.")] = None
    steps_lost: Annotated[
        int | None,
        Meta(
            description="Steps that are repeated: those after the step at which the workers resumed; until they "
            "report one, those after the newest checkpoint. Unset: unknown."
        ),
    ] = None
    recovery_seconds: Annotated[
        int | None, Meta(description="From the interruption to the first step that was seen afterwards.")
    ] = None


class CodeStatus(_Fields, frozen=True, kw_only=True):
    """The code that the pods run, where `ddp submit --workdir` packed it."""

    digest: Annotated[str, Meta(description="SHA-256 of the archive's tar.")]
    commit: Annotated[str | None, Meta(description="Commit of the git repository that the folder is in.")] = None
    dirty: Annotated[bool | None, Meta(description="True: the folder differed from that commit.")] = None
    revision: Annotated[str, Meta(description="Commit and digest in short, such as 1a2b3c4d5e6f-dirty, for people.")]


class Straggler(_Fields, frozen=True, kw_only=True):
    """A rank that keeps the others waiting: its own work per step takes at least 1.3 times the median rank's."""

    rank: int
    ratio: Annotated[str, Meta(description="Its own time per step relative to the median rank's, such as 1.8.")]
    cause: Annotated[Literal["compute", "data"], Meta(description="Where most of that time goes.")]


class LastFailure(_Fields, frozen=True, kw_only=True):
    """The root cause of the latest failure: the earliest one that is not secondary (the loss of a peer). Training may
    have been started again since, in the same pods or with new ones."""

    attempt: int
    rank: Annotated[int | None, Meta(description="Global rank of the failed worker, if it was a worker.")] = None
    node: Annotated[int | None, Meta(description="Completion index of the pod.")] = None
    pod: str = ""
    container: Annotated[str, Meta(description="The init container that failed. Unset: the training container.")] = ""
    node_name: Annotated[str, Meta(description="Kubernetes node on which the pod ran.")] = ""
    exit_code: int | None = None
    category: str
    message: str = ""
    traceback: Annotated[str, Meta(description="The tail of the worker's traceback, else its last lines.")] = ""
    hint: Annotated[str, Meta(description="What to do about it.")] = ""
    conclusion: Annotated[
        str, Meta(description="Why the job was not started again after it. Unset: it was, or the category says why.")
    ] = ""
    time: Time | None = None
    signature: Annotated[
        str,
        Meta(
            description="What a failure of the script has in common with its repetitions: the exception and its place "
            "in the script, such as KeyError at train.py:42, or the exit code. Unset: the failure is not the script's."
        ),
    ] = ""
    step: Annotated[int | None, Meta(description="The step that the failing rank had reached.")] = None


class LostUsage(_Fields, frozen=True, kw_only=True):
    """GPU-seconds that an interruption of training has cost."""

    cause: Annotated[str, Meta(description="Category of the failure, or what else it was: Resized, Stalled.")]
    gpu_seconds: int


class Usage(_Fields, frozen=True, kw_only=True, omit_defaults=False):
    """What the job's GPUs were held for, in GPU-seconds: the time that a GPU is on a node for one of its pods."""

    gpus: Annotated[int, Meta(description="GPUs of the pods that are on a node, since `since`.")] = 0
    since: Annotated[Time, Meta(description="Until when it is counted.")]
    idle_since: Annotated[
        Time | None, Meta(description="Since when GPUs are held without a step. Unset: there are steps, or no GPUs.")
    ] = None
    gpu_seconds: Annotated[int, Meta(description="All of it: productive, waiting and lost.")] = 0
    productive: Annotated[int, Meta(description="While training made steps that were not repeated later.")] = 0
    waiting: Annotated[
        int, Meta(description="From a pod's place on a node to the first step: images, imports, the other pods.")
    ] = 0
    lost: Annotated[
        tuple[LostUsage, ...],
        Meta(description="After interruptions, until the next step, with the steps that were repeated."),
    ] = ()


class InputStatus(_Fields, frozen=True, kw_only=True):
    """One of spec.inputs on its way to where pods find it."""

    name: str
    phase: Literal["Pending", "Fetching", "Fetched", "Failed"]
    bytes: Annotated[int, Meta(description="Those that are there.")] = 0
    total_bytes: Annotated[int | None, Meta(description="Unset: the source does not tell, or is not asked yet.")] = None
    place: Annotated[
        str, Meta(description="Its folder: claim: and the claim's name, or node: and a path, then that below it.")
    ] = ""
    etag: Annotated[str, Meta(description="What its source calls this version of the file.")] = ""
    checksum: Annotated[str, Meta(description="That of the spec, which it has.")] = ""
    reason: Annotated[
        str, Meta(description="Why it has failed, or is tried again, as of the condition InputsReady.")
    ] = ""
    message: str = ""


class Profile(_Fields, frozen=True, kw_only=True):
    """The profile as the job has taken it, when it started: what is edited there later does not change the job."""

    kind: Annotated[
        str,
        Meta(description="That of spec.profileRef; JobDefaults, without a name: what the operator's settings give."),
    ]
    name: str
    digest: Annotated[str, Meta(description="Of job and locked: two jobs with the same one have taken the same.")]
    job: Annotated[Any, Meta(description="What it gave: a part of a spec, over which go the job's own values.")]
    locked: Annotated[tuple[str, ...], Meta(description="Fields of the spec that the job may not set otherwise.")] = ()


class ClaimedGpus(_Fields, frozen=True, kw_only=True):
    """What the job's resource claims gave when it started: what becomes of their templates later changes nothing."""

    gpus: Annotated[int, Meta(description="GPUs of each pod, beside those of the container's limits.")]
    digest: Annotated[
        str, Meta(description="Of what it was counted for: the claims that the spec names, and procPerNode.")
    ]


class Status(_Fields, frozen=True, kw_only=True):
    """The observed job; ``attempt``, ``restarts`` and ``lastFailure`` are what the operator has decided."""

    observed_generation: int = 0
    phase: Annotated[Phase | None, Meta(description="A summary for printing; conditions are what to program on.")] = (
        None
    )
    reason: Annotated[
        str, Meta(description="What the job waits for or why it failed, in a word; conditions have the details.")
    ] = ""
    attempt: Annotated[int, Meta(description="1 for the first Job, one more for each restart of all pods.")] = 0
    attempt_nodes: Annotated[int, Meta(description="spec.nodes for which the current attempt was started.")] = 0
    job_name: str = ""
    start_time: Time | None = None
    attempt_time: Annotated[
        Time | None,
        Meta(description="When the current attempt was started or last resumed."),
    ] = None
    first_run_time: Annotated[
        Time | None,
        Meta(
            description="When a pod of the job first ran. Until then the template and other fields that only the Job "
            "uses may be changed."
        ),
    ] = None
    completion_time: Time | None = None
    selector: Annotated[str, Meta(description="Label selector of the pods, for the scale subresource.")] = ""
    nodes: Nodes = field(default_factory=Nodes)
    restarts: Restarts = field(default_factory=Restarts)
    inputs: tuple[InputStatus, ...] = ()
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    preflight: PreflightStatus | None = None
    code: CodeStatus | None = None
    tracking: TrackingStatus | None = None
    history: History | None = None
    start_step: Annotated[
        int | None, Meta(description="Step at which the job began: 0, or that of a checkpoint which it found.")
    ] = None
    goodput: Annotated[
        str | None, Meta(description="Share of the wall time that moved the run forward, 0 to 1: docs/metrics.md.")
    ] = None
    usage: Annotated[Usage | None, Meta(description="What GPUs were held for. Unset: none was, or not yet.")] = None
    stragglers: Annotated[
        tuple[Straggler, ...],
        Meta(description="In the last minute, the slowest first, at most 8; up to 16 pods are compared."),
    ] = ()
    last_restart: LastRestart | None = None
    last_failure: LastFailure | None = None
    failed_nodes: Annotated[
        tuple[str, ...],
        Meta(description="Kubernetes nodes that were lost with a pod on them, the latest last; at most 10."),
    ] = ()
    profile: Profile | None = None
    claims: ClaimedGpus | None = None
    conditions: tuple[Condition, ...] = ()

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of a type."""
        return next((one for one in self.conditions if one.type == kind), None)

    def is_true(self, kind: str) -> bool:
        """Tell whether a condition is there and True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"
