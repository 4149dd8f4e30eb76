"""torchrun on one machine, as one host or as several."""

from virtual_gpus.testing.hosts import TORCHRUN, run_hosts
from virtual_gpus.testing.network import free_port

__all__ = ["TORCHRUN", "free_port", "run_hosts"]
