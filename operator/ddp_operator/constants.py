"""Names that several modules, the pods and the users share. Values here are API: change them only with a migration.

What the launcher needs as well comes from its ``contract``. The half that the trainer also needs (environment
variables, exit codes, metric names, ports) is written again in ``ddp_trainer.contract``, because the trainer must not
import the operator; ``tests/contract`` keeps the two equal.
"""

from typing import Final

from ddp_operator.launcher.contract import *

GROUP: Final = "ddp-operator.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "DDPTrainingJob"
PLURAL: Final = "ddptrainingjobs"
SINGULAR: Final = "ddptrainingjob"
SHORT_NAMES: Final = ("ddp", "ddpjob")
CRD_NAME: Final = f"{PLURAL}.{GROUP}"
CLUSTER_PROFILE_KIND: Final = "ClusterDDPTrainingProfile"
PROFILE_KIND: Final = "DDPTrainingProfile"
# In status.profile of a job that names none: what the operator's settings give every job.
JOB_DEFAULTS: Final = "JobDefaults"

# Labels on every child. A child is found by its label and trusted by its owner reference.
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "ddp-operator"
MANAGED_BY_CLI: Final = "ddp"  # what `ddp submit` makes beside the job
LABEL_JOB_NAME: Final = f"{GROUP}/job-name"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
# On the operator's own pods, by the chart: a job's NetworkPolicy lets these read its metrics.
LABEL_COMPONENT: Final = f"{GROUP}/component"
COMPONENT_OPERATOR: Final = "operator"
KUEUE_DOMAIN: Final = "kueue.x-k8s.io"
KUEUE_QUEUE_LABEL: Final = f"{KUEUE_DOMAIN}/queue-name"
KUEUE_PRIORITY_LABEL: Final = f"{KUEUE_DOMAIN}/priority-class"
# Annotations of a Job: with how few pods it may begin, and that it is complete with as many.
KUEUE_MIN_PARALLELISM: Final = f"{KUEUE_DOMAIN}/job-min-parallelism"
KUEUE_SYNC_COMPLETIONS: Final = f"{KUEUE_DOMAIN}/job-completions-equal-parallelism"
# Annotations that begin so are about the pods: Kueue reads them at the pod template.
KUEUE_POD_SET_PREFIX: Final = f"{KUEUE_DOMAIN}/podset-"
# An elastic Job's pods are made with it, and Kueue takes it away from those that have quota. Also the name of the
# annotation that asks for it.
KUEUE_ELASTIC_GATE: Final = f"{KUEUE_DOMAIN}/elastic-job"
# On the pod template of a Job that Kueue has admitted, also of one that names no queue.
KUEUE_PODSET_LABEL: Final = f"{KUEUE_DOMAIN}/podset"
MAX_ANNOTATION: Final = 1024
"""Characters of a child's annotation; longer ones of Kueue's are not compared with those of the resource."""
# On a Workload: the UID of its Job.
KUEUE_JOB_UID_LABEL: Final = f"{KUEUE_DOMAIN}/job-uid"
ANNOTATION_SPEC: Final = f"{GROUP}/spec"
"""On a Job: a digest of the fields of the spec that it was built from and that may change until a pod has run."""
# On a child Job: the value of spec.suspend that the operator wrote last. Where they differ, somebody else decides.
ANNOTATION_SUSPEND: Final = f"{GROUP}/suspend"
# Written by the Job controller on every pod of an Indexed Job.
ANNOTATION_COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"
JOB_TRACKING_FINALIZER: Final = "batch.kubernetes.io/job-tracking"
"""On a pod until the Job controller has counted how it ended."""

# <name>-<attempt>-<index> must be a DNS label of at most 63 characters: 50 + "-" + 6 + "-" + 5.
MAX_NAME_LENGTH: Final = 50
MAX_NODES: Final = 5000  # as many nodes as Kubernetes supports in one cluster

POD_GROUP: Final = "PodGroup"  # of Volcano and of the coscheduling plugin, each in its own API group

TRAINER_CONTAINER: Final = "trainer"

# Environment of the training container (set by the operator) that the launcher does not read.
ENV_JOB_NAME: Final = "DDP_JOB_NAME"
ENV_JOB_NAMESPACE: Final = "DDP_JOB_NAMESPACE"

# A user who sets one of these in the pod template is refused: torchrun or the operator owns them.
RESERVED_ENV: Final = frozenset(
    {
        *(value for name, value in globals().items() if name.startswith("ENV_") and name != "ENV_OMP_NUM_THREADS"),
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    }
)
RESERVED_ENV_PREFIXES: Final = ("PET_",)

# These exit codes, and deaths by signal (128 + its number), are answered by a new pod under the same index; every other
# failure ends the attempt, because an agent that leaves takes its peers' rendezvous with it.
REPLACED_EXIT_CODES: Final = (EXIT_PREEMPTED, 130, 137, 143)

DEFAULT_METRICS_PORT: Final = 9400
PORT_NAMES: Final = ("rendezvous", "metrics")  # in the Service and in the training container
LAUNCHER_MOUNT_PATH: Final = "/opt/ddp-operator"
LAUNCHER_FILE: Final = "launcher.py"  # what a pod starts; the launcher's modules lie beside it
LAUNCHER_VOLUME: Final = "ddp-launcher"
# A ConfigMap without data in each namespace with jobs: its owners are the jobs, and it owns their launchers.
LAUNCHER_USERS: Final = "ddp-launcher-users"
SHM_VOLUME: Final = "ddp-shm"
CHECKPOINT_VOLUME: Final = "ddp-checkpoint"
CODE_VOLUME: Final = "ddp-code"  # the archive of spec.code
CODE_MOUNT_PATH: Final = "/opt/ddp-code"
CODE_FILE: Final = "code.tar.gz"  # in a ConfigMap and in an image
CODE_FOLDER: Final = "/workspace"  # where it is unpacked
CODE_FOLDER_VOLUME: Final = "ddp-workspace"
PACKAGES_VOLUME: Final = "ddp-packages"  # what spec.code.pip installs
PACKAGES_MOUNT_PATH: Final = "/opt/ddp-packages"
VOLUMES: Final = (LAUNCHER_VOLUME, SHM_VOLUME, CHECKPOINT_VOLUME, CODE_VOLUME, CODE_FOLDER_VOLUME, PACKAGES_VOLUME)
"""What the operator's own volumes are called."""
INPUTS_VOLUME: Final = "ddp-inputs"  # the beginning of their names; the init container's

# Series of the trainer that the operator reads, beside those of the launcher's contract.
METRIC_SAMPLES: Final = "ddp_samples_total"
METRIC_LOSS: Final = "ddp_loss"
METRIC_EPOCH: Final = "ddp_epoch"
METRIC_EPOCHS: Final = "ddp_planned_epochs"
METRIC_TOTAL_STEPS: Final = "ddp_planned_steps"
METRIC_VAL_ACCURACY: Final = "ddp_validation_accuracy_ratio"
METRIC_VAL_LOSS: Final = "ddp_validation_loss"
METRIC_LEARNING_RATE: Final = "ddp_learning_rate"
METRIC_GLOBAL_RATE: Final = "ddp_global_samples_per_second"
METRIC_DATA_SECONDS: Final = "ddp_data_wait_seconds_total"
METRIC_COMPUTE_SECONDS: Final = "ddp_compute_seconds_total"
