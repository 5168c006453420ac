"""A stand-in for the Kubernetes API server, for tests that need one and have none.

It keeps to what the operator, Kopf and kubectl rely on: versions and preconditions, watches with their ways to fail,
the status subresource, owner references, the Job controller. The same tests run against a real one where that is
present, which is how it is kept honest.
"""

from .actors import ClusterActors
from .faults import Fault, Faults
from .running import StandIn

__all__ = ["ClusterActors", "Fault", "Faults", "StandIn"]
