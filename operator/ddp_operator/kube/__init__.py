"""The cluster behind an API server; the only package that talks to one."""

from ddp_operator.kube.client import ApiClient, ApiError, StartupError
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.kube.credentials import login

__all__ = ["ApiClient", "ApiError", "KubeCluster", "StartupError", "login"]
