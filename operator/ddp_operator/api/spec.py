"""``DDPTrainingJob.spec`` as typed, frozen values. The CRD's schema and its defaults are generated from these classes.

Bounds are CEL rules in ``rules.py`` rather than constraints here: the message of a rule includes the remedy, and
``kubectl apply`` and ``ddp render`` print the same message.
"""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from ddp_operator.api.constants import DEFAULT_METRICS_PORT, DEFAULT_RENDEZVOUS_PORT

MAX_RESTARTS: Final = 3
"""Default of ``spec.recovery.maxRestarts`` in a cluster, and in ``ddp drill``, which measures a restart."""
LOCAL_MAX_RESTARTS: Final = 0
"""The same in ``ddp run``: a mistake in the script ends the run at once."""


class SpecFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Base of a group of spec fields. Unknown fields are refused."""


class SecretReference(SpecFields, frozen=True, kw_only=True):
    """A Secret of the job's namespace. Its keys become environment variables of the training container."""

    name: Annotated[str, Meta(description="Name of the Secret.")]


class Rendezvous(SpecFields, frozen=True, kw_only=True):
    """Rendezvous of the torchrun agents."""

    backend: Annotated[
        Literal["c10d", "static"],
        Meta(
            description="c10d: agents join at a store on pod 0, and rejoin after a failure. static: the ranks use "
            "that store too, at its port, and do not restart in the same pods."
        ),
    ] = "c10d"
    port: Annotated[int, Meta(description="Port of the rendezvous store on pod 0, 1024 to 65535.")] = (
        DEFAULT_RENDEZVOUS_PORT
    )
    join_timeout_seconds: Annotated[
        int, Meta(description="Seconds that a pod waits for pod 0 and all other pods before it fails (Network).")
    ] = 600


class Elastic(SpecFields, frozen=True, kw_only=True):
    """Bounds within which the number of pods may change without a new Job."""

    min_nodes: Annotated[
        int, Meta(description="Training continues while at least this many pods run, 1 to maxNodes.")
    ] = 1
    max_nodes: Annotated[int, Meta(description="Maximum of spec.nodes, at most 5000.")]


class Recovery(SpecFields, frozen=True, kw_only=True):
    """Restarts after a failure (docs/api.md, Restarts)."""

    in_place_restarts: Annotated[
        int | None,
        Meta(
            description="Maximum restarts of an attempt in the same pods, which then do not count towards "
            "maxRestarts. Unset: maxRestarts is the limit."
        ),
    ] = None
    max_restarts: Annotated[
        int,
        Meta(description="Maximum restarts after failures, in the same or with new pods."),
    ] = MAX_RESTARTS
    reset_after_steps: Annotated[
        int,
        Meta(description="Steps by which a checkpoint must advance to reset the count for maxRestarts."),
    ] = 1000
    count_disruptions: Annotated[
        bool, Meta(description="True: evictions, preemptions and lost nodes count towards maxRestarts.")
    ] = False
    non_retryable_exit_codes: Annotated[
        tuple[int, ...],
        Meta(description="Exit codes of the script, 1 to 255, after which the job is not restarted."),
    ] = (2, 126, 127)
    force_delete_after_seconds: Annotated[
        int,
        Meta(
            description="Seconds until the operator removes a pod that terminates on a deleted or unready node, "
            "and marks it as failed."
        ),
    ] = 120
    avoid_failed_nodes: Annotated[
        bool,
        Meta(
            description="True: later attempts avoid lost nodes (status.failedNodes), unless the job cannot be "
            "scheduled without them."
        ),
    ] = True
    warm_start: Annotated[
        Literal["Auto", "Off"] | None,
        Meta(
            description="Auto: a pod imports PyTorch once and forks its ranks at each start. Off: each rank "
            "starts in a new interpreter. Unset: Auto."
        ),
    ] = None


class Checkpoint(SpecFields, frozen=True, kw_only=True):
    """Where the training script keeps its checkpoints."""

    path: Annotated[str, Meta(description="Absolute path in the container; the script finds it in DDP_CHECKPOINT_DIR.")]
    claim_name: Annotated[
        str | None,
        Meta(
            description="PersistentVolumeClaim mounted at the path, shared by all pods. Unset: the template's "
            "volume there, otherwise one that is deleted with the pod."
        ),
    ] = None
    url: Annotated[
        str | None,
        Meta(
            description="Folder of this job in an object store for copies of the path, instead of a claim: "
            "s3://bucket/prefix, gs://…, file://…, or another scheme of fsspec (docs/checkpoints.md)."
        ),
    ] = None
    secret_ref: Annotated[
        SecretReference | None,
        Meta(
            description="Secret whose keys become variables of the trainer container, such as AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL."
        ),
    ] = None
    keep: Annotated[int | None, Meta(description="Newest snapshots that are kept at the url. Unset: 3.")] = None
    shared: Annotated[
        bool | None,
        Meta(
            description="True: other jobs may write to the claim at the same time, each its own files. Otherwise "
            "the job waits for them."
        ),
    ] = None
    grace_seconds: Annotated[int, Meta(description="Seconds after SIGTERM for a pod to save a checkpoint.")] = 120


class Metrics(SpecFields, frozen=True, kw_only=True):
    """The pod's Prometheus endpoint, served by the launcher."""

    port: Annotated[int, Meta(description="Port of /metrics in every training pod, 1024 to 65535.")] = (
        DEFAULT_METRICS_PORT
    )
    log_patterns: Annotated[
        tuple[str, ...],
        Meta(
            description="Regular expressions that find progress in the log by named groups "
            "(docs/pod-contract.md). Example: 'step (?P<step>[0-9]+)'."
        ),
    ] = ()
    auto_instrument: Annotated[
        bool,
        Meta(
            description="Count the optimizer steps of each Python rank and compare the ranks, without a change of "
            "the script (docs/your-script.md)."
        ),
    ] = True
    epochs: Annotated[
        int | None,
        Meta(description="Number of epochs, if neither the log nor an option of the command (--epochs 3) has it."),
    ] = None


class Scheduling(SpecFields, frozen=True, kw_only=True):
    """Placement of the pods; the template has their scheduler and PriorityClass. For Kueue, set its label
    kueue.x-k8s.io/queue-name on the job."""

    placement: Annotated[
        Literal["Any", "Pack", "Spread"],
        Meta(
            description="Pack: pods prefer to share a topology domain, to fill a node's GPUs. Spread: pods prefer "
            "different domains. Any: no preference."
        ),
    ] = "Any"
    topology_key: Annotated[
        str | None,
        Meta(description="Node label whose values are the domains of placement. Unset: kubernetes.io/hostname."),
    ] = None


class Template(SpecFields, frozen=True, kw_only=True):
    """Pod template. The container named trainer (or the only one) runs the training script in its command/args. Its
    image needs Python and torch."""

    metadata: Annotated[Any, Meta(description="Labels and annotations of the pods.")] = None
    spec: Annotated[Any, Meta(description="Pod spec, as in a Job: containers, volumes, nodeSelector, …")]


class Spec(SpecFields, frozen=True, kw_only=True):
    """Desired state of the job."""

    nodes: Annotated[int, Meta(description="Number of pods (torchrun nodes), 1 to 5000.")] = 1
    proc_per_node: Annotated[
        int | str,
        Meta(
            description="Ranks per pod: a number, gpu (one per GPU of the limits, docs/reference.md), cpu (one per CPU "
            "of the limits), or auto (gpu if the pod has GPUs, otherwise 1)."
        ),
    ] = "auto"
    spares: Annotated[
        int | None,
        Meta(
            description="Spare pods in addition to nodes, 0 to 16. A spare imports PyTorch, waits, and replaces a "
            "lost pod other than pod 0 at once."
        ),
    ] = None
    elastic: Elastic | None = None
    suspend: Annotated[
        bool, Meta(description="True: no pod runs. Running pods get SIGTERM and their grace time first.")
    ] = False
    managed_by: Annotated[
        str | None,
        Meta(
            description="kueue.x-k8s.io/multikueue: Kueue runs the job in another cluster. Any other controller: this "
            "operator ignores the job. Immutable."
        ),
    ] = None
    template: Template
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    shared_memory: Annotated[
        str | None,
        Meta(
            description="Size of /dev/shm for DataLoader workers, NCCL and copies in memory: a quantity such as 8Gi, "
            "or a share of the container's memory limit such as 50%. Unset: half of the node's memory."
        ),
    ] = None
    recovery: Recovery = field(default_factory=Recovery)
    checkpoint: Checkpoint | None = None
    metrics: Metrics = field(default_factory=Metrics)
    scheduling: Scheduling = field(default_factory=Scheduling)
    active_deadline_seconds: Annotated[
        int | None,
        Meta(
            description="Maximum seconds that the job is active, without suspension and queues; then it fails "
            "(DeadlineExceeded). The time restarts when the job is resumed or admitted."
        ),
    ] = None
    pending_deadline_seconds: Annotated[
        int | None,
        Meta(
            description="Maximum seconds until all pods of an attempt run; then the job fails "
            "(PendingDeadlineExceeded). The time restarts with each attempt, resumption, admission "
            "and eviction by a queue."
        ),
    ] = None
    success_policy: Annotated[
        Literal["AllNodes", "RankZero"],
        Meta(
            description="AllNodes: the job succeeds when all pods succeed. RankZero: when pod 0, which has rank "
            "0, succeeds; the operator then stops the others."
        ),
    ] = "AllNodes"
    clean_pod_policy: Annotated[
        Literal["All", "Running", "None"],
        Meta(
            description="Pods to delete when the job ends. Running: those that still run; the others keep their "
            "logs. All: all. None: none."
        ),
    ] = "Running"
    ttl_seconds_after_finished: Annotated[
        int | None,
        Meta(description="Seconds after the end until this resource is deleted; not under GitOps (docs/reference.md)."),
    ] = None
    security_profile: Annotated[
        Literal["Default", "Restricted"],
        Meta(
            description="Default: no privilege escalation, seccomp RuntimeDefault. Restricted: also non-root and "
            "no capabilities, for the restricted Pod Security Standard. Values in the template take "
            "precedence."
        ),
    ] = "Default"
