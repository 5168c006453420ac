"""``DDPTrainingJob.spec`` as typed, frozen values. The CRD's schema and its defaults are generated from these classes.

Bounds are CEL rules in ``rules.py`` rather than constraints here: a rule can say the remedy, and ``kubectl apply`` and
``ddp render`` then print the same sentence.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from ddp_operator.api.inputs import Input
from ddp_operator.api.tracking import SecretReference, Tracking
from ddp_operator.constants import CODE_FOLDER, DEFAULT_METRICS_PORT, DEFAULT_RENDEZVOUS_PORT


class _Fields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Common behaviour: immutable, keyword-only, camelCase in JSON, unknown fields refused."""


class Rendezvous(_Fields, frozen=True, kw_only=True):
    """How torchrun agents find each other."""

    backend: Annotated[
        Literal["c10d", "static"],
        Meta(description="c10d: agents meet at a store on pod 0, and again after a failure. static: fixed node ranks."),
    ] = "c10d"
    port: Annotated[int, Meta(description="Port of the rendezvous store on pod 0, 1024 to 65535.")] = (
        DEFAULT_RENDEZVOUS_PORT
    )
    join_timeout_seconds: Annotated[
        int, Meta(description="Seconds that a pod waits for the master and for all other pods before it fails.")
    ] = 600


class Elastic(_Fields, frozen=True, kw_only=True):
    """Bounds within which the number of pods may change while the job runs, without a new Job."""

    min_nodes: Annotated[int, Meta(description="Training continues while this many pods are left, 1 to maxNodes.")] = 1
    max_nodes: Annotated[int, Meta(description="Maximum of spec.nodes, at most 5000.")]


class Shm(_Fields, frozen=True, kw_only=True):
    """Shared memory of a pod (``/dev/shm``), which DataLoader workers and NCCL use."""

    size_limit: Annotated[
        str | None, Meta(description="Upper bound as a quantity (8Gi). Unset: half of the node's memory.")
    ] = None


class NodeHealth(_Fields, frozen=True, kw_only=True):
    """Trouble that detectors report on the nodes of the pods. Names may be shell patterns, such as Xid*."""

    conditions: Annotated[
        tuple[str, ...], Meta(description="Types of node conditions that are trouble while their status is True.")
    ] = ()
    taints: Annotated[tuple[str, ...], Meta(description="Keys of taints that are trouble, whatever their effect.")] = ()
    action: Annotated[
        Literal["Migrate", "Report"] | None,
        Meta(
            description="Migrate: the pods save and stop, and a new attempt, which is not counted, avoids the node. "
            "Report, also where unset: the condition NodesHealthy and an Event."
        ),
    ] = None


class Recovery(_Fields, frozen=True, kw_only=True):
    """What happens after a failure. The workers are restarted in the same pods first, then all pods, in a new Job."""

    in_place_restarts: Annotated[
        int | None,
        Meta(
            description="How often the workers of an attempt are restarted in the same pods, apart from maxRestarts. "
            "Unset: as often as maxRestarts allows, and counted there, unless the pods may be the cause; never with "
            "the static rendezvous."
        ),
    ] = None
    max_restarts: Annotated[
        int,
        Meta(
            description="How often training is started again after a failure: in the same pods where that can help, "
            "else with new pods, in a new Job."
        ),
    ] = 3
    reset_after_steps: Annotated[
        int,
        Meta(
            description="A checkpoint this many steps beyond the one at the last counted restart starts the count for "
            "maxRestarts again at 0."
        ),
    ] = 1000
    count_disruptions: Annotated[
        bool, Meta(description="Whether evictions, preemptions and lost nodes count towards maxRestarts too.")
    ] = False
    non_retryable_exit_codes: Annotated[
        tuple[int, ...],
        Meta(description="Exit codes of the training script after which no restart is tried, each 1 to 255."),
    ] = (2, 126, 127)
    force_delete_after_seconds: Annotated[
        int,
        Meta(
            description="Seconds that a deleted pod on a node that is gone or not ready may delay the job before it "
            "is marked as failed and removed."
        ),
    ] = 120
    avoid_failed_nodes: Annotated[
        bool,
        Meta(
            description="Keep later attempts off nodes that were lost (status.failedNodes), unless the job can't be "
            "scheduled without them."
        ),
    ] = True
    node_health: Annotated[
        NodeHealth | None, Meta(description="Unset: nodes are looked at only where a pod does not end.")
    ] = None
    warm_start: Annotated[
        Literal["Auto", "Off"] | None,
        Meta(
            description="Auto, also where unset: a pod imports PyTorch once, and its ranks are forked from that one "
            "at each start and restart. Off: each rank starts in a fresh interpreter."
        ),
    ] = None


class Watchdog(_Fields, frozen=True, kw_only=True):
    """What happens when training makes no progress. A step, or a call of ``heartbeat()``, is progress."""

    start_seconds: Annotated[
        int, Meta(description="Seconds that the workers may take from their start to their first step.")
    ] = 900
    stall_seconds: Annotated[
        int,
        Meta(
            description="Seconds without a step or heartbeat of any rank of a pod. For a script that reports neither: "
            "seconds in which its workers use no CPU, or its log shows no step, before that is reported."
        ),
    ] = 300
    checkpoint_seconds: Annotated[
        int, Meta(description="The same while a rank reports that it is saving a checkpoint.")
    ] = 1800
    action: Annotated[
        Literal["Restart", "Fail", "Report"],
        Meta(
            description="What follows a hang, once all stacks are in the log. Restart: as after any failure, in the "
            "same pods first. Fail: the job fails. Report: nothing. A script whose steps only metrics.logPatterns show "
            "is stopped only if none of its ranks computes (docs/pod-contract.md); one that has shown no step is only "
            "reported."
        ),
    ] = "Restart"


class Preflight(_Fields, frozen=True, kw_only=True):
    """Network checks before training, once all pods of an attempt have joined. The results are in the status."""

    mode: Annotated[
        Literal["Off", "Warn", "Fail"],
        Meta(description="Fail: a failed check ends the attempt. Warn: it is only reported. Off: no checks."),
    ] = "Warn"
    checks: Annotated[
        tuple[Literal["dns", "tcp", "allreduce", "pairs"], ...],
        Meta(
            description="dns: the names of pod 0 and of the next pod. tcp: connections to both. allreduce: bandwidth "
            "over all ranks, by NCCL on GPUs and gloo on CPUs; it takes a second, and some more on GPUs. pairs: "
            "the same, and bandwidth between pods two by two, each with at most eight others."
        ),
    ] = ("dns", "tcp")
    min_megabytes_per_second: Annotated[
        int, Meta(description="The all-reduce check fails below this bus bandwidth, in 10^6 bytes a second.")
    ] = 0


class Network(_Fields, frozen=True, kw_only=True):
    """The network between the nodes, and whether training may begin on another one (docs/fabric.md). Pods of one node
    alone get nothing of it."""

    profile: Annotated[
        Literal["auto", "socket", "ib", "roce", "efa", "tcpxo"],
        Meta(
            description="What the pods get below the template, which wins: variables, devices, capabilities, sidecars. "
            "auto: nothing. socket: TCP alone. ib: InfiniBand. roce: RDMA over Ethernet. efa: AWS. tcpxo: "
            "GPUDirect-TCPXO of GKE."
        ),
    ] = "auto"
    require: Annotated[
        bool,
        Meta(
            description="True: the preflight's all-reduce is made, and the attempt fails before training where NCCL "
            "uses another network than the profile's (auto: where it uses sockets), or a pair of pods is too slow."
        ),
    ] = False
    min_pair_megabytes_per_second: Annotated[
        int | None,
        Meta(
            description="The check pairs fails where the bandwidth between two pods is below this, in 10^6 bytes a "
            "second. Unset: what the profile expects of any machine."
        ),
    ] = None


class Idle(_Fields, frozen=True, kw_only=True):
    """What happens when GPUs are held for long without a step, whatever the pods do meanwhile."""

    minutes: Annotated[int, Meta(description="Minutes without a step or a heartbeat while pods hold GPUs.")]
    action: Annotated[
        Literal["Report", "Suspend"] | None,
        Meta(
            description="Suspend: spec.suspend is set, and the job goes on when it is resumed. Report, also where "
            "unset: an Event and the condition Idle. A script that runs in all pods and has never reported a step is "
            "only reported."
        ),
    ] = None


class Checkpoint(_Fields, frozen=True, kw_only=True):
    """Where the training script keeps its checkpoints."""

    path: Annotated[str, Meta(description="Absolute path in the container; the script finds it in DDP_CHECKPOINT_DIR.")]
    claim_name: Annotated[
        str | None,
        Meta(
            description="PersistentVolumeClaim mounted there, shared by all pods. "
            "Unset: what the pod template mounts at the path, else a volume that lives as long as the pod."
        ),
    ] = None
    url: Annotated[
        str | None,
        Meta(
            description="Folder in a store that keeps what is saved at the path, instead of a claim: "
            "s3://bucket/prefix, gs://…, file://…, or what else fsspec and its plug-ins in the image know. The newest "
            "whole snapshot is fetched before the ranks start; pod 0 uploads changes in the background. One for each "
            "job."
        ),
    ] = None
    secret_ref: Annotated[
        SecretReference | None,
        Meta(
            description="Secret whose keys become environment variables of the trainer container: those of the store, "
            "such as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL."
        ),
    ] = None
    keep: Annotated[
        int | None, Meta(description="Snapshots of the path that are kept at the url, the newest ones. Unset: 3.")
    ] = None
    shared: Annotated[
        bool | None,
        Meta(
            description="True: other jobs may write to the claim at the same time, because each writes its own files. "
            "Otherwise the job waits until every started job with the same claim has ended."
        ),
    ] = None
    grace_seconds: Annotated[int, Meta(description="Seconds that a pod has after SIGTERM to save a checkpoint.")] = 120


class Code(_Fields, frozen=True, kw_only=True):
    """The folder that the training command runs in, packed by `ddp submit --workdir`. Each pod unpacks it once,
    before its ranks start. One of configMapName, claimName and image has the archive."""

    digest: Annotated[
        str, Meta(description="SHA-256 of the archive's tar, in hex. A pod that finds another archive fails.")
    ]
    config_map_name: Annotated[str | None, Meta(description="ConfigMap whose key code.tar.gz is the archive.")] = None
    claim_name: Annotated[str | None, Meta(description="PersistentVolumeClaim with the archive.")] = None
    path: Annotated[str | None, Meta(description="Path of the archive in the claim.")] = None
    image: Annotated[
        str | None,
        Meta(
            description="OCI image with the archive as /code.tar.gz, by its digest, mounted as an image volume "
            "(Kubernetes 1.35, or 1.31 with the feature gate ImageVolume)."
        ),
    ] = None
    commit: Annotated[str | None, Meta(description="Commit of the git repository that the folder is in.")] = None
    dirty: Annotated[bool | None, Meta(description="True: the folder differed from that commit.")] = None
    mount_path: Annotated[
        str | None,
        Meta(
            description="Where the pods have the folder, and the working directory of the command. Unset: /workspace."
        ),
    ] = None
    pip: Annotated[
        str | None,
        Meta(
            description="A requirements file in the folder. Each pod installs it with pip, beside the image's "
            "packages, before its ranks start."
        ),
    ] = None

    @property
    def folder(self) -> str:
        """Where the pods have the folder."""
        return (self.mount_path or CODE_FOLDER).rstrip("/")


class Metrics(_Fields, frozen=True, kw_only=True):
    """The pod's Prometheus endpoint, served by the launcher."""

    port: Annotated[int, Meta(description="Port of /metrics in every training pod, 1024 to 65535.")] = (
        DEFAULT_METRICS_PORT
    )
    log_patterns: Annotated[
        tuple[str, ...],
        Meta(
            description="Python regular expressions, searched in each line of a rank's output instead of those of "
            "known training loops (docs/your-script.md). Their named groups are the progress of a script that does not "
            "export it: step, totalSteps, epoch, epochs, loss, learningRate, samples (processed by the rank), "
            "samplesPerSecond (of all ranks, where samples is not given), valAccuracy, valLoss; for example "
            "'step (?P<step>[0-9]+)'."
        ),
    ] = ()
    epochs: Annotated[
        int | None,
        Meta(
            description="Total epochs of the run, if the log shows the epoch, but neither a line nor an option of the "
            "command, such as --epochs 3, shows their number."
        ),
    ] = None


class Scheduling(_Fields, frozen=True, kw_only=True):
    """Which scheduler places the pods, and how. For Kueue, set its label kueue.x-k8s.io/queue-name on the job."""

    gang: Annotated[
        Literal["None", "Coscheduling", "Volcano"],
        Meta(
            description="All pods of an attempt start or none. Coscheduling: the scheduler plug-in's PodGroup. "
            "Volcano: Volcano's PodGroup. None: pod by pod, as the cluster's scheduler does (Kueue still admits them "
            "together, and so does Kubernetes' own gang scheduling where it is enabled)."
        ),
    ] = "None"
    scheduler_name: Annotated[
        str | None, Meta(description="Scheduler of the pods. Unset: the gang's own, else the cluster's default.")
    ] = None
    queue: Annotated[str | None, Meta(description="Volcano's queue. Unset: its default one.")] = None
    priority_class_name: Annotated[str | None, Meta(description="PriorityClass of the pods.")] = None
    placement: Annotated[
        Literal["Any", "Pack", "Spread"],
        Meta(
            description="Pack: pods prefer to share a topology domain, so that a node's GPUs are filled first. "
            "Spread: pods prefer different domains. Any: as the scheduler likes."
        ),
    ] = "Any"
    topology_key: Annotated[
        str | None,
        Meta(description="Node label whose values are the domains of placement. Unset: kubernetes.io/hostname."),
    ] = None


class Peer(_Fields, frozen=True, kw_only=True):
    """Who may connect, as in `from` of a NetworkPolicy."""

    namespace_selector: Annotated[Any, Meta(description="Namespaces by their labels.")] = None
    pod_selector: Annotated[Any, Meta(description="Pods by their labels.")] = None
    ip_block: Annotated[Any, Meta(description="A range of addresses; not together with a selector.")] = None


class NetworkPolicy(_Fields, frozen=True, kw_only=True):
    """Limits the pods' network traffic; needs a network plug-in that enforces NetworkPolicies."""

    enabled: Annotated[
        bool,
        Meta(
            description="True: pods talk only to pods of the same job, to DNS and to egressCidrs, and only the "
            "operator and metricsFrom reach them from elsewhere, at their metrics' port."
        ),
    ] = False
    egress_cidrs: Annotated[
        tuple[str, ...], Meta(description="Further addresses that the pods may reach, such as 10.0.0.0/8.")
    ] = ()
    metrics_from: Annotated[
        tuple[Peer, ...] | None,
        Meta(
            description="Who besides the operator may read the pods' metrics, as `from` of a NetworkPolicy has it "
            "(namespaceSelector, podSelector, ipBlock). Unset: pods labelled app.kubernetes.io/name=prometheus in any "
            "namespace. []: nobody."
        ),
    ] = None


class Template(_Fields, frozen=True, kw_only=True):
    """Pod template. The container named trainer (or the only one) runs the training script in its command/args; any
    image with Python and torch will do."""

    metadata: Annotated[Any, Meta(description="Labels and annotations of the pods.")] = None
    spec: Annotated[Any, Meta(description="The pods, as in a Job: containers, volumes, nodeSelector, …")]


class ProfileRef(_Fields, frozen=True, kw_only=True):
    """A profile of the platform: it gives what the job leaves out, and locks what the job may not change."""

    kind: Annotated[
        Literal["ClusterDDPTrainingProfile", "DDPTrainingProfile"] | None,
        Meta(
            description="ClusterDDPTrainingProfile, also where unset: one for all namespaces. DDPTrainingProfile: one "
            "of the job's own namespace."
        ),
    ] = None
    name: Annotated[str, Meta(description="Name of the profile; `ddp profile list` lists them.")]


class Spec(_Fields, frozen=True, kw_only=True):
    """The desired job."""

    profile_ref: Annotated[
        ProfileRef | None,
        Meta(
            description="The profile that completes this spec. The job takes it when it starts; what is edited in it "
            "later does not change the job (docs/profiles.md)."
        ),
    ] = None

    nodes: Annotated[int, Meta(description="Number of pods (torchrun nodes), 1 to 5000. The scale subresource.")] = 1
    proc_per_node: Annotated[
        int | str,
        Meta(
            description="Worker processes per pod: a number, gpu (one per GPU of the limits and resource "
            "claims; docs/reference.md has their names), cpu (one per CPU in the limits), or auto (gpu if there are "
            "GPUs, else 1)."
        ),
    ] = "auto"
    spares: Annotated[
        int | None,
        Meta(
            description="Pods beside the nodes, 0 to 16, that have imported PyTorch and wait; the place of a pod that "
            "is lost, other than pod 0, is taken by one at once. They use resources and quota as every other pod."
        ),
    ] = None
    elastic: Elastic | None = None
    suspend: Annotated[
        bool, Meta(description="True: no pod runs; running pods get SIGTERM and their grace time first.")
    ] = False
    template: Template
    code: Code | None = None
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    shm: Shm = field(default_factory=Shm)
    recovery: Recovery = field(default_factory=Recovery)
    watchdog: Watchdog = field(default_factory=Watchdog)
    idle: Annotated[Idle | None, Meta(description="Unset: GPUs may be held as long as the job is active.")] = None
    preflight: Preflight = field(default_factory=Preflight)
    network: Annotated[Network | None, Meta(description="Unset: as NCCL finds it (profile auto).")] = None
    checkpoint: Checkpoint | None = None
    inputs: Annotated[
        tuple[Input, ...] | None,
        Meta(description="Data and models that are fetched before the job asks for GPUs, at most 16: docs/inputs.md."),
    ] = None
    metrics: Metrics = field(default_factory=Metrics)
    tracking: Tracking | None = None
    scheduling: Scheduling = field(default_factory=Scheduling)
    network_policy: NetworkPolicy = field(default_factory=NetworkPolicy)
    active_deadline_seconds: Annotated[
        int | None,
        Meta(
            description="Seconds that the job may be active before it fails. Time in which it is suspended or queued "
            "does not count: as for a batch/v1 Job, the clock starts again when the job is resumed or admitted."
        ),
    ] = None
    pending_deadline_seconds: Annotated[
        int | None,
        Meta(
            description="Seconds that the job may wait until all pods of an attempt run before it fails: in a queue, "
            "for a node, for an image. The clock starts again with each attempt, when the job is resumed, and when a "
            "queue admits the job or evicts its pods."
        ),
    ] = None
    success_policy: Annotated[
        Literal["AllNodes", "RankZero"],
        Meta(description="Which pods must succeed: all, or pod 0, where rank 0 is; the others are then stopped."),
    ] = "AllNodes"
    process_group_policy: Annotated[
        Literal["Warn", "Fail", "Ignore"] | None,
        Meta(
            description="What happens if all pods succeed although no process group (torch.distributed) spanned all "
            "ranks, so that they did not train together. Warn: the condition Distributed is False, and an Event says "
            "so. Fail: the job fails. Ignore: nothing, and launchers inside the command (bash -c 'torchrun …') are "
            "accepted. Unset: Warn."
        ),
    ] = None
    clean_pod_policy: Annotated[
        Literal["All", "Running", "None"],
        Meta(
            description="What happens to the pods when the job ends. Running: pods that still run are stopped, the "
            "others stay for their logs. All: all pods are deleted. None: all pods stay as they are."
        ),
    ] = "Running"
    ttl_seconds_after_finished: Annotated[
        int | None, Meta(description="Seconds after which this resource is deleted once it has succeeded or failed.")
    ] = None
    security_profile: Annotated[
        Literal["Default", "Restricted"],
        Meta(
            description="Default: no privilege escalation, seccomp RuntimeDefault. Restricted: also non-root and no "
            "capabilities, so that the pods pass the restricted Pod Security Standard. Values in the template win."
        ),
    ] = "Default"
