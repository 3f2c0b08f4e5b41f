"""DeepSpeed-MII's persistent front door: servers that outlive their maker, and their clients."""

from jaxgen.deployments.client import Client, client
from jaxgen.deployments.launch import serve
from jaxgen.deployments.records import DeploymentNotFound

__all__ = ["Client", "DeploymentNotFound", "client", "serve"]
