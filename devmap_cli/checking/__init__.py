"""The judge: what is wrong with a device map, derived anew from the map and the model; it never asks the planner."""

from devmap_cli.checking.coverage import check_map, weights_by_device
from devmap_cli.checking.findings import Finding

__all__ = ["Finding", "check_map", "weights_by_device"]
