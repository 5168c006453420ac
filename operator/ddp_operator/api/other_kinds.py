"""Kinds of others and of features, and their labels: names that the kernel does not decide about.

They are API, as those of ``constants``.
"""

from typing import Final

from ddp_operator.api.constants import GROUP, KUEUE_DOMAIN

CRD_KIND: Final = "CustomResourceDefinition"
CLUSTER_PROFILE_KIND: Final = "ClusterDDPTrainingProfile"
PROFILE_KIND: Final = "DDPTrainingProfile"
WORKLOAD_KIND: Final = "Workload"
KUEUE_PRIORITY_LABEL: Final = f"{KUEUE_DOMAIN}/priority-class"
# On a Workload: the UID of its Job.
KUEUE_JOB_UID_LABEL: Final = f"{KUEUE_DOMAIN}/job-uid"
MULTIKUEUE: Final = f"{KUEUE_DOMAIN}/multikueue"
"""The value of spec.managedBy for a job that Kueue runs in another cluster."""
ANNOTATION_CLUSTER: Final = f"{GROUP}/cluster"
"""On a job that Kueue runs in another cluster: the name of its MultiKueueCluster."""
MANAGED_BY_CLI: Final = "ddp"
"""The label app.kubernetes.io/managed-by of objects that `ddp submit` creates in addition to the job."""
