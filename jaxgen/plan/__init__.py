"""Plans a deployment from a config alone: no weights, no accelerator, the real compiled steps."""

from jaxgen.plan.deployment import Deployment, plan_deployment
from jaxgen.plan.topology import Topology, parse_topology

__all__ = ["Deployment", "Topology", "parse_topology", "plan_deployment"]
