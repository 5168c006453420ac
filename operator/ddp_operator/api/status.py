"""``DDPTrainingJob.status`` as typed, frozen values.

Fractional numbers are strings, as the Kubernetes API conventions require. Times are datetimes here and RFC 3339 in
JSON. Truncate a time to seconds before you store it, so that it equals the value that is read back.

A new field is declared here, also one of a feature. ``decide/describe.record_observation`` sets it if it is observed,
``decide/attempts`` if an attempt decides it, the hook ``record`` of a feature if that owns it. One that belongs to an
attempt is reset in ``attempts._build_next_attempt``. One that changes often is also in
``transitions.is_minor_change``, or each change is written at once; a large one is cut in ``refusals.shorten_status``.
`make generate` writes the CRD and docs/api.md.
"""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

Phase = Literal["Pending", "Rejected", "Suspended", "Running", "Held", "Restarting", "Succeeded", "Failed"]
ENDED_PHASES: Final = ("Succeeded", "Failed", "Rejected")
"""Phases that a job does not leave without an edit."""
ConditionStatus = Literal["True", "False", "Unknown"]
RunResult = Literal["Succeeded", "Failed", "Stopped", "Lost"]
RecoveryLevel = Literal["SamePods", "ReplacedPod", "NewPods"]
Time = Annotated[datetime, Meta(tz=True)]
OPAQUE: Final = "x-kubernetes-preserve-unknown-fields"
"""Marks a field whose members the schema does not describe."""


class StatusFields(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of a group of status fields. Unknown fields are ignored: a newer operator may have written them."""


class Condition(StatusFields, frozen=True, kw_only=True):
    """One condition in the form of metav1.Condition."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""
    last_transition_time: Time
    observed_generation: int = 0


class Nodes(StatusFields, frozen=True, kw_only=True, omit_defaults=False):
    """Pods of the current attempt."""

    desired: int = 0
    ready: Annotated[int, Meta(description="Ready pods, without spares.")] = 0
    spares: Annotated[int, Meta(description="Ready spares.")] = 0
    succeeded: int = 0
    failed: int = 0


class Restarts(StatusFields, frozen=True, kw_only=True, omit_defaults=False):
    """Restarts of the training, or of the present run of `ddp dev`."""

    all: Annotated[
        int, Meta(description="In the same pods, of single pods that the Job replaced, and of all pods.")
    ] = 0
    in_place: Annotated[int, Meta(description="In the same pods, over all attempts.")] = 0
    used: Annotated[
        int,
        Meta(
            description="After failures, since a checkpoint last reset the count; without disruptions, resizes "
            "and resumptions."
        ),
    ] = 0
    limit: Annotated[
        int, Meta(description="spec.recovery.maxRestarts, also that of a profile; with more, the job fails.")
    ] = 0


class RestartCounts(StatusFields, frozen=True, kw_only=True):
    """What the operator counts to decide about restarts."""

    total: int = 0
    """Restarts with new pods: one for each attempt after the first."""
    counted: int = 0
    """Restarts that count towards maxRestarts, in the same pods or with new pods."""
    free: int = 0
    """Restarts with new pods that do not count: after a disruption, a change of spec.nodes or a resumption."""
    disrupted_in_a_row: int = 0
    """Disruptions in a row, each less than 300 s after the restart before it, and without a step."""
    used: int = 0
    """Counted restarts since a checkpoint last reset the count; compared with maxRestarts."""
    without_progress: int = 0
    """Consecutive failures without a new step in between."""
    step: int = 0
    """Highest step that was known at the last counted failure."""
    checkpoint_step: int = 0
    """Step of the checkpoint at the last counted failure."""
    in_place: int = 0
    """Restarts of the workers in the same pods, over all attempts."""
    in_place_before: int = 0
    """The part of in_place that earlier attempts had."""
    in_place_after_loss: int = 0
    """The part of in_place that followed the loss of a pod, which replaced counts, or a resize."""
    replaced: int = 0
    """Single pods that were replaced while training waited, by the Job or by a queue."""
    before_run: int = 0
    """The part of total and replaced that preceded the present run of `ddp dev`."""

    @property
    def all(self) -> int:
        """The number of all restarts of the job, or of the present run of `ddp dev`."""
        return self.total + self.replaced + self.own_in_place - self.before_run

    @property
    def own_in_place(self) -> int:
        """Restarts in the same pods that follow neither the loss of a pod nor a resize."""
        return self.in_place - self.in_place_after_loss


STATE_VERSION: Final = 1
"""Version of OperatorState. Another one is not read: a field whose meaning changes needs a new number."""


class OperatorState(StatusFields, frozen=True, kw_only=True):
    """What the operator remembers between its passes, for no other reader or writer: its members change without
    notice."""

    version: int = field(default_factory=lambda: STATE_VERSION)  # a plain default would not be stored
    nodes: int = 0
    """Number of nodes of the current attempt."""
    restarts: RestartCounts = RestartCounts()
    children: tuple[str, ...] = ()
    """UIDs of the Services and NetworkPolicies that the operator has created for the job, or has compared with what it
    would create; at most 8."""
    usage_time: Time | None = None
    """Time up to which status.usage counts."""
    idle_since: Time | None = None
    """Time since which the job holds GPUs without a step. None: it makes steps, or has no GPUs."""
    start_step: int | None = None
    """Step at which the job, or the run of `ddp dev`, started: 0, or the step of an existing checkpoint."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes that were lost, one entry for each loss, the latest last; at most 20. Those of status.failedNodes with one
    entry are avoided until they are ready again, all others for the rest of the job."""


SAMPLES: Final = "samples/s"
"""Unit of progress.throughput if the number of samples is known."""


class Progress(StatusFields, frozen=True, kw_only=True):
    """Progress that rank 0 last reported."""

    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    total_steps: int | None = None
    percent: Annotated[str | None, Meta(description="Completed share of all steps, such as 42.0%.")] = None
    eta: Annotated[str | None, Meta(description="Estimated remaining time, such as 5m12s.")] = None
    loss: str | None = None
    steps_per_second: str | None = None
    throughput: Annotated[
        str | None,
        Meta(description="Samples/s over all ranks, or steps/s if the number of samples is unknown, with the unit."),
    ] = None
    learning_rate: str | None = None
    val_accuracy: str | None = None
    val_loss: str | None = None
    last_step_time: Time | None = None

    @property
    def samples_per_second(self) -> str | None:
        """The throughput if it is that of samples; None: their number is unknown, or the steps have stopped."""
        rate, _, unit = (self.throughput or "").partition(" ")
        return rate if unit == SAMPLES else None


class PreflightStatus(StatusFields, frozen=True, kw_only=True):
    """Results of the checks before training, from pod 0."""

    failed: Annotated[tuple[str, ...], Meta(description="Failed checks; the log of pod 0 has the reasons.")] = ()
    all_reduce_megabytes_per_second: Annotated[
        str | None, Meta(description="Bus bandwidth over all ranks, in 10^6 bytes per second.")
    ] = None
    transport: Annotated[
        str | None,
        Meta(
            description="Between pods, from NCCL's log: IB, RoCE, EFA, FasTrak, NVLink, Socket, or another plug-in, "
            "such as IB with GPUDirect RDMA if all channels use that."
        ),
    ] = None
    slowest: Annotated[
        str,
        Meta(
            description="Pods with the lowest bandwidth between them, in one direction over all their ranks, such "
            "as: pods 2 and 7 (nodes gpu-a3 and gpu-b1): 21840 MB/s."
        ),
    ] = ""


class CheckpointStatus(StatusFields, frozen=True, kw_only=True):
    """Newest checkpoint that the script reported."""

    step: int
    time: Annotated[Time | None, Meta(description="When the operator first observed it.")] = None


class TrackingStatus(StatusFields, frozen=True, kw_only=True):
    """Run in the trackers of spec.tracking."""

    run_id: Annotated[str, Meta(description="DDP_TRACKING_RUN and WANDB_RUN_ID of the ranks.")]
    links: Annotated[tuple[str, ...], Meta(description="Pages of the run in MLflow and W&B.")] = ()


class LastRestart(StatusFields, frozen=True, kw_only=True):
    """The latest restart of all workers, and its cost."""

    attempt: Annotated[int, Meta(description="Attempt that the restart started, or in whose pods it happened.")]
    level: Annotated[
        RecoveryLevel | None,
        Meta(
            description="SamePods: the workers restarted in their pods. ReplacedPod: the Job replaced a lost pod. "
            "NewPods: a new Job replaced all pods."
        ),
    ] = None
    cause: Annotated[str, Meta(description="Category of the failure, or another reason, such as Resized.")] = ""
    time: Annotated[Time, Meta(description="When training was interrupted, or its resize requested.")]
    step: Annotated[int | None, Meta(description="Highest step reported before the interruption.")] = None
    steps_lost: Annotated[
        int | None,
        Meta(description="Repeated steps; until the workers report a step, those after the newest checkpoint."),
    ] = None
    recovery_seconds: Annotated[int | None, Meta(description="From the interruption to the next observed step.")] = None


StragglerCause = Literal["compute", "data", "sleep", "throttled", "cpu", "storage", "memory"]


class Straggler(StatusFields, frozen=True, kw_only=True):
    """A rank that its peers wait for: its own work takes at least 1.3 times as long per step as the median rank's."""

    rank: int
    ratio: Annotated[str, Meta(description="Own time per step relative to the median rank's, such as 1.8.")]
    cause: Annotated[
        StragglerCause,
        Meta(
            description="Main part of that time. compute: the model. data: the wait for data. sleep: its process uses "
            "no CPU. throttled: by its pod's limit of CPUs. cpu, storage, memory: waits for them."
        ),
    ]


class LastFailure(StatusFields, frozen=True, kw_only=True):
    """Root cause of the latest failure: the earliest that is not secondary (the loss of a peer). Training may have
    restarted since."""

    attempt: int
    rank: Annotated[int | None, Meta(description="Global rank of the failed worker.")] = None
    pod_index: Annotated[int | None, Meta(description="Completion index of the pod.")] = None
    pod: str = ""
    container: Annotated[str, Meta(description="Init container that failed. Unset: the training container.")] = ""
    node_name: Annotated[str, Meta(description="Kubernetes node of the pod.")] = ""
    exit_code: int | None = None
    category: str
    message: str = ""
    traceback: Annotated[str, Meta(description="End of the traceback; without one, the last lines of output.")] = ""
    remedy: Annotated[str, Meta(description="What to do about it.")] = ""
    conclusion: Annotated[
        str, Meta(description="Why the job was not restarted, if the category is not the reason.")
    ] = ""
    time: Time | None = None
    signature: Annotated[
        str,
        Meta(description="Identity of a failure of the script, such as KeyError at train.py:42, or the exit code."),
    ] = ""
    step: Annotated[int | None, Meta(description="Step that the failed rank had reached.")] = None


class DevStatus(StatusFields, frozen=True, kw_only=True):
    """Runs of a job with spec.dev. Progress, history, lastFailure and restarts in the same pods are those of the
    run."""

    run: Annotated[int, Meta(description="Run in the pods. 0: none, because its code was lost.")] = 0
    result: Annotated[RunResult | None, Meta(description="How the run ended. Unset: it has not.")] = None
    start_time: Time | None = None
    completion_time: Time | None = None
    release_time: Annotated[
        Time | None, Meta(description="When the pods end without another run. Unset: they are not held.")
    ] = None
    last_run: Annotated[int, Meta(description="Highest former run; pod 0 has the last ten. 0: none.")] = 0

    @property
    def last_number(self) -> int:
        """The highest number of a run. After all pods were lost, their run may have a lower one."""
        return max(self.run, self.last_run)

    @property
    def lost_runs(self) -> int:
        """The number of runs whose code new pods do not have; 0: run 1 has not ended, and starts again."""
        is_first = not self.last_run and self.run <= 1 and self.result is None
        return 0 if is_first else self.last_number


class LostUsage(StatusFields, frozen=True, kw_only=True):
    """GPU-seconds lost to interruptions of one cause."""

    cause: Annotated[str, Meta(description="Category of the failure, or Resized, Stalled or Held.")]
    gpu_seconds: int


class Usage(StatusFields, frozen=True, kw_only=True, omit_defaults=False):
    """Use of the job's GPUs in GPU-seconds: the time that a pod of the job holds a GPU of a node."""

    gpus: Annotated[int, Meta(description="GPUs of the scheduled pods.")] = 0
    gpu_seconds: Annotated[int, Meta(description="Sum of productive, waiting and lost.")] = 0
    productive: Annotated[int, Meta(description="Time with steps that were not repeated.")] = 0
    waiting: Annotated[int, Meta(description="From the scheduling of a pod to the first step.")] = 0
    lost: Annotated[
        tuple[LostUsage, ...],
        Meta(description="From interruptions to the next step, and the time of repeated steps."),
    ] = ()


class QueueStatus(StatusFields, frozen=True, kw_only=True):
    """Place of a waiting job in its ClusterQueue of Kueue. Small changes are not recorded."""

    cluster_queue: str
    position: Annotated[int, Meta(description="1: the next one.")]
    of: Annotated[int, Meta(description="Number of waiting Workloads.")]
    waits_for: Annotated[str, Meta(description="First resource without enough free quota.")] = ""
    start_p50: Annotated[
        Time | None, Meta(description="The job has started by then with a probability of 50 % (estimate).")
    ] = None
    start_p90: Annotated[Time | None, Meta(description="The same with 90 %.")] = None


class InputStatus(StatusFields, frozen=True, kw_only=True):
    """State of one of spec.inputs."""

    name: str
    phase: Literal["Pending", "Fetching", "Fetched", "Failed"]
    bytes: Annotated[int, Meta(description="Fetched so far.")] = 0
    total_bytes: Annotated[int | None, Meta(description="Size at the source, if known.")] = None
    place: Annotated[str, Meta(description="claim:NAME/PATH, or node:PATH for a cache on the nodes.")] = ""
    reason: Annotated[str, Meta(description="Of the failure or retry, as in the condition InputsReady.")] = ""
    message: str = ""


class Profile(StatusFields, frozen=True, kw_only=True):
    """Copy of the profile at the start of the job."""

    kind: Annotated[
        str,
        Meta(description="Kind of the profile; JobDefaults, without a name: defaults of the operator's settings."),
    ]
    name: str
    digest: Annotated[str, Meta(description="Of job.")]
    job: Annotated[Any, Meta(description="Part of a spec; the job's own values take precedence.")]


class Status(StatusFields, frozen=True, kw_only=True):
    """Observed state of the job. The operator decides ``attempt`` and ``lastFailure``."""

    observed_generation: int = 0
    phase: Annotated[Phase | None, Meta(description="For people; programs should read the conditions.")] = None
    reason: Annotated[
        str, Meta(description="Why the job waits or failed, as one identifier; conditions have the details.")
    ] = ""
    attempt: Annotated[int, Meta(description="1 for the first Job; one more with each restart of all pods.")] = 0
    job_name: str = ""
    start_time: Time | None = None
    attempt_time: Annotated[
        Time | None,
        Meta(description="When the current attempt was started or last resumed."),
    ] = None
    first_run_time: Annotated[
        Time | None,
        Meta(description="When a pod of the job first ran; until then the template can be changed."),
    ] = None
    completion_time: Time | None = None
    selector: Annotated[str, Meta(description="Of the pods, for the scale subresource.")] = ""
    nodes: Nodes = field(default_factory=Nodes)
    restarts: Restarts = field(default_factory=Restarts)
    inputs: tuple[InputStatus, ...] = ()
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    preflight: PreflightStatus | None = None
    tracking: TrackingStatus | None = None
    points: Annotated[
        tuple[str, ...],
        Meta(
            description="Metrics over time for `ddp report`, as lines of a CSV file: the columns of metrics.csv of "
            "`ddp run`, then at most 60 rows. When there are more, every second one is removed."
        ),
    ] = ()
    goodput: Annotated[
        str | None, Meta(description="Share of the wall time with productive steps, 0 to 1 (docs/metrics.md).")
    ] = None
    usage: Annotated[Usage | None, Meta(description="Use of the job's GPUs. Unset: the job has held no GPU yet.")] = (
        None
    )
    dev: DevStatus | None = None
    stragglers: Annotated[
        tuple[Straggler, ...],
        Meta(
            description="Of the last minute (at first 15 s), the slowest first, at most 8; of up to 16 compared pods."
        ),
    ] = ()
    last_restart: LastRestart | None = None
    last_failure: LastFailure | None = None
    failed_nodes: Annotated[
        tuple[str, ...],
        Meta(
            description="Nodes that new pods avoid, lost ones until they are Ready again; the latest last, at most 10."
        ),
    ] = ()
    queue: Annotated[QueueStatus | None, Meta(description="Unset: the job does not wait in a queue.")] = None
    profile: Profile | None = None
    conditions: tuple[Condition, ...] = ()
    operator_state: Annotated[OperatorState, Meta(extra_json_schema={OPAQUE: True})] = field(
        default_factory=OperatorState
    )

    @property
    def counts(self) -> RestartCounts:
        """What the operator counts to decide about restarts."""
        return self.operator_state.restarts

    @property
    def attempt_nodes(self) -> int:
        """Number of nodes of the current attempt, of which nodes.desired informs users."""
        return self.operator_state.nodes

    def remember(self, **members: Any) -> "Status":
        """Return the status with other members of the operator's state."""
        return replace(self, operator_state=replace(self.operator_state, **members))

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of a type."""
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def is_true(self, kind: str) -> bool:
        """Return whether a condition exists and is True."""
        condition = self.condition(kind)
        return condition is not None and condition.status == "True"

    def is_false(self, kind: str) -> bool:
        """Return whether a condition exists and is False."""
        condition = self.condition(kind)
        return condition is not None and condition.status == "False"
