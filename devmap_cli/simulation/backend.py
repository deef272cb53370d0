"""Registers the simulated device type with PyTorch, once per process, and starts simulations on it."""

from __future__ import annotations

import types
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import library
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from devmap_cli.devices.capability import DEFAULT_CAPABILITY
from devmap_cli.simulation import attention as _attention  # noqa: F401  # registers its kernel
from devmap_cli.simulation import kernels
from devmap_cli.simulation.machine import (
    DEVICE_TYPE,
    Machine,
    SimulatedDevice,
    activated,
    active_machine,
    num_active_devices,
)
from devmap_cli.simulation.module_tracker import ModuleTracker
from devmap_cli.simulation.numbers import RealNumbers
from devmap_cli.simulation.operators import run_operator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from devmap_cli.devices.capability import Capability
    from devmap_cli.simulation.numbers import Numbers
    from devmap_cli.simulation.trace import Recorder

_COMPOSED = (
    # made of an empty tensor and a kernel that resizes it, which a simulated tensor's shape cannot follow
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "eye",
    "eye.m",
    "randperm",
    "tril_indices",
    "triu_indices",
    # computed in another way for a device type that PyTorch does not know than for the CPU
    "linear",
    "scaled_dot_product_attention",
    "_local_scalar_dense",
)
"""Operators kept whole, to be run as the CPU runs them."""

_libraries: list[Any] = []
"""The registered kernels; they go when these do, so these live as long as the process."""


@contextmanager
def simulated_devices(
    capacities: Sequence[int],
    *,
    expandable_segments: bool = False,
    compute_capabilities: Sequence[Capability] | None = None,
    numbers: Numbers | None = None,
    recorder: Recorder | None = None,
) -> Iterator[Machine]:
    """Simulate devices `sim:0`, `sim:1`, ... of `capacities` bytes; an integer device means one of them.

    `compute_capabilities` (one per device, `DEFAULT_CAPABILITY` without them) decide between attention kernels. Tensors
    hold real numbers unless other `numbers` are given, and `recorder` is told of each allocation.
    The device type stays registered with PyTorch when the simulation ends, but has no devices then: PyTorch still takes
    it for the accelerator that an integer means, so real ones are used in another process or by name ("cuda:0").
    Raises RuntimeError if a simulation is running already.
    """
    _register_once()
    capabilities = [DEFAULT_CAPABILITY] * len(capacities) if compute_capabilities is None else compute_capabilities
    devices = [
        SimulatedDevice(
            index,
            capacity,
            expandable_segments=expandable_segments,
            compute_capability=capability,
        )
        for index, (capacity, capability) in enumerate(zip(capacities, capabilities, strict=True))
    ]
    modules = ModuleTracker(recorder)
    with activated(Machine(devices, numbers or RealNumbers(), modules, recorder)) as machine:
        yield machine


def _register_once() -> None:
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_device_module())
    registry: Any = library.Library  # untyped in torch
    aten = registry("aten", "IMPL", "PrivateUse1")
    aten.impl("empty.memory_format", kernels.empty)
    aten.impl("empty_strided", kernels.empty_strided)
    aten.impl("_copy_from", kernels.copy_from)
    for name in _COMPOSED:
        packet, _, overload = name.partition(".")
        aten.impl(name, _runs(getattr(getattr(torch.ops.aten, packet), overload or "default")))
    anything = registry("_", "IMPL")
    anything.fallback(lambda func, *args, **kwargs: run_operator(func, args, kwargs), "PrivateUse1")
    _libraries.extend((aten, anything))


def _runs(func: Any) -> Any:
    return lambda *args, **kwargs: run_operator(func, args, kwargs)


def _device_module() -> types.ModuleType:
    """What PyTorch and the libraries on it ask of `torch.<device type>`."""
    module: Any = types.ModuleType(f"torch.{DEVICE_TYPE}")
    module.is_available = lambda: num_active_devices() > 0
    module.is_initialized = module.is_available
    module.device_count = num_active_devices
    module.current_device = lambda: 0
    # Random numbers come from the CPU's generator, which PyTorch seeds itself.
    module.manual_seed_all = lambda _seed: None
    module.get_rng_state = lambda _device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, _device=None: torch.set_rng_state(state)
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.synchronize = lambda _device=None: None
    module.empty_cache = _empty_caches
    module.mem_get_info = lambda device=0: (_device(device).free_bytes, _device(device).total_bytes)
    module.memory_allocated = lambda device=0: _device(device).use.allocated_bytes
    module.memory_reserved = lambda device=0: _device(device).use.reserved_bytes
    module.max_memory_allocated = lambda device=0: _device(device).peak.allocated_bytes
    module.max_memory_reserved = lambda device=0: _device(device).peak.reserved_bytes
    module.reset_peak_memory_stats = lambda device=0: _device(device).reset_peak()
    return module  # type: ignore[no-any-return]  # Any, to set attributes on


def _device(device: int | str | torch.device | None) -> SimulatedDevice:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return active_machine().device(index)


def _empty_caches() -> None:
    active_machine().empty_caches()
