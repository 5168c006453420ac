"""A stand-in for the Kubernetes API server.

It implements what the operator, Kopf and kubectl rely on: versions and preconditions, watches and their failures, the
status subresource, owner references, the Job controller. One test suite compares it with a real server.
"""

from .actors import ClusterActors
from .faults import Fault, Faults
from .running import StandIn

__all__ = ["ClusterActors", "Fault", "Faults", "StandIn"]
