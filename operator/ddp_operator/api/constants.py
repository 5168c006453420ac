"""Names that modules, pods and users share. They are API: change a value only with a migration.

The launcher's ``contract`` defines the names that it uses too. ``ddp_sdk.contract`` repeats those that the trainer
uses (environment variables, exit codes, metric names, ports), because the trainer must not import the operator.
``tests/contract`` compares the two.
"""

from typing import Final

from ddp_pod.contract import names
from ddp_pod.contract.names import *

GROUP: Final = "ddp-operator.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "DDPTrainingJob"
PLURAL: Final = "ddptrainingjobs"
CRD_NAME: Final = f"{PLURAL}.{GROUP}"

# Labels on every child. The operator selects children by label, and checks their owner references.
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "ddp-operator"
CONTROLLER_NAME: Final = f"{GROUP}/ddp-operator"
"""The value of spec.managedBy for this operator; the same as an unset field."""
LABEL_JOB_NAME: Final = f"{GROUP}/job-name"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
KUEUE_DOMAIN: Final = "kueue.x-k8s.io"
KUEUE_QUEUE_LABEL: Final = f"{KUEUE_DOMAIN}/queue-name"
# Annotations of a Job for partial admission: its minimum of pods, and that completions follow parallelism.
KUEUE_MIN_PARALLELISM: Final = f"{KUEUE_DOMAIN}/job-min-parallelism"
KUEUE_SYNC_COMPLETIONS: Final = f"{KUEUE_DOMAIN}/job-completions-equal-parallelism"
# Prefix of the annotations that Kueue reads from the pod template.
KUEUE_POD_SET_PREFIX: Final = f"{KUEUE_DOMAIN}/podset-"
# Scheduling gate on the pods of an elastic Job. Kueue removes it from pods with quota. The annotation that enables it
# has the same name.
KUEUE_ELASTIC_GATE: Final = f"{KUEUE_DOMAIN}/elastic-job"
# Kueue sets it on the pod template of an admitted Job, also of one without a queue name.
KUEUE_PODSET_LABEL: Final = f"{KUEUE_DOMAIN}/podset"
MAX_ANNOTATION: Final = 1024
"""Maximum characters of a child's annotation in the cache. Longer ones are not compared with the resource's."""
# On the copy of a job of another cluster that Kueue runs: the origin as label, the name of its Workload as either.
KUEUE_ORIGIN_LABEL: Final = f"{KUEUE_DOMAIN}/multikueue-origin"
KUEUE_PREBUILT_WORKLOAD: Final = f"{KUEUE_DOMAIN}/prebuilt-workload-name"
ANNOTATION_SPEC: Final = f"{GROUP}/spec"
"""On a Job: a digest of those fields of its spec that users may change until a pod has run."""
# On a child Job: the value of spec.suspend that the operator wrote last. If they differ, a queue controls the Job.
ANNOTATION_SUSPEND: Final = f"{GROUP}/suspend"
# Proxies that service meshes inject: the container, and the pod annotation that keeps it out. A proxy would intercept
# the rendezvous, and never end, so that the Job would not end.
MESH_PROXIES: Final = {
    "istio-proxy": ("sidecar.istio.io/inject", "false"),
    "linkerd-proxy": ("linkerd.io/inject", "disabled"),
    "consul-dataplane": ("consul.hashicorp.com/connect-inject", "false"),
    "kuma-sidecar": ("kuma.io/sidecar-injection", "disabled"),
}
# Domains of labels with a meaning for Kubernetes, a mesh or a deployment tool, which children must not inherit.
PRIVATE_LABEL_DOMAINS: Final = tuple(
    f".{domain}"
    for domain in (
        *("kubernetes.io", "k8s.io", "x-k8s.io", GROUP, "istio.io", "linkerd.io", "hashicorp.com", "kuma.io"),
        *("helm.sh", "argoproj.io", "fluxcd.io", "volcano.sh"),
    )
)
INHERITED_LABELS: Final = tuple(f"app.kubernetes.io/{name}" for name in ("name", "component", "part-of", "version"))
# Written by the Job controller on every pod of an Indexed Job.
ANNOTATION_COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"
JOB_TRACKING_FINALIZER: Final = "batch.kubernetes.io/job-tracking"
"""On a pod until the Job controller has counted its end."""

MAX_NODES: Final = 5000  # as many nodes as Kubernetes supports in one cluster

TRAINER_CONTAINER: Final = "trainer"

# Environment variables of the training container that the launcher does not read.
ENV_JOB_NAME: Final = "DDP_JOB_NAME"
ENV_JOB_NAMESPACE: Final = "DDP_JOB_NAMESPACE"

_TORCHRUN_ENV: Final = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
)
_LAUNCHER_ENV: Final = frozenset(value for name, value in vars(names).items() if name.startswith("ENV_"))
RESERVED_ENV: Final = {ENV_JOB_NAME, ENV_JOB_NAMESPACE, *_TORCHRUN_ENV, *_LAUNCHER_ENV} - {ENV_OMP_NUM_THREADS}
"""Variables that torchrun or the operator sets. A pod template that sets one of them is refused."""
RESERVED_ENV_PREFIXES: Final = ("PET_",)

# After these exit codes (130 and more: 128 + a signal) the Job replaces the pod under its index. Every other failure
# fails the attempt, because the rendezvous of the peers ends with the agent. No launcher ends with EXIT_UNSEEN:
# containerd reports it if it has not seen the end, because the node has restarted.
EXIT_UNSEEN: Final = 255
REPLACED_EXIT_CODES: Final = (EXIT_PREEMPTED, 130, 137, 143, EXIT_UNSEEN)

DEFAULT_METRICS_PORT: Final = 9400
RENDEZVOUS_KEY: Final = "secret"  # of the Secret with ENV_RENDEZVOUS_SECRET
LAUNCHER_MOUNT_PATH: Final = "/opt/ddp-operator"
LAUNCHER_FILE: Final = "launcher.py"  # the file that a pod starts
LAUNCHER_ARCHIVE: Final = "launcher.zip"  # the packages, in the same folder; ``bootstrap`` has the name too
LAUNCHER_VOLUME: Final = "ddp-launcher"
SHM_VOLUME: Final = "ddp-shm"
CHECKPOINT_VOLUME: Final = "ddp-checkpoint"
CODE_VOLUME: Final = "ddp-code"  # the archive of spec.code
CODE_FOLDER_VOLUME: Final = "ddp-workspace"
PACKAGES_VOLUME: Final = "ddp-packages"  # the packages of spec.code.pip
