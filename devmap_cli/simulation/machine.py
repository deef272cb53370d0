"""A machine of simulated devices: what each has in memory, and what moved between them."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devmap_cli.devices.capability import DEFAULT_CAPABILITY, Capability, matmul_workspace_bytes
from devmap_cli.simulation.allocator import CachingAllocator
from devmap_cli.simulation.memory import AllocatorOutOfMemoryError, MemoryUse
from devmap_cli.simulation.work import WorkCounter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from devmap_cli.simulation.module_tracker import ModuleTracker
    from devmap_cli.simulation.numbers import Numbers
    from devmap_cli.simulation.pool import Block
    from devmap_cli.simulation.taping import Tape
    from devmap_cli.simulation.trace import Recorder

DEVICE_TYPE = "sim"
"""The name of PyTorch's PrivateUse1 device type while this package uses it."""

_ADDRESSES_PER_DEVICE = 1 << 48
"""Devices have disjoint address ranges, so that `data_ptr()` tells tensors of different devices apart."""
_HOST_BYTES = 1 << 60
"""The host is never full: what it has is for others to check."""


@dataclass(frozen=True)
class Transfer:
    """One copy from a device to another: device names as in `torch.device`, the module that was running."""

    source: str
    target: str
    num_bytes: int
    module: str
    phase: str


class Allocation:
    """The device memory of one storage; returned to the device when the last tensor on it is gone.

    `number` is the one it has in the recorded trace, None where none is recorded. `copy_of` is what it holds an
    unchanged copy of, and `is_workspace` that it is the matrix library's. `shapes` stands for it on the meta device.
    `taped` is the number that a tape gave it, if one ran.
    """

    __slots__ = ("block", "device", "num_bytes", "number", "shapes", "tape", "taped")

    def __init__(
        self,
        device: SimulatedDevice,
        num_bytes: int,
        *,
        copy_of: Allocation | None = None,
        is_workspace: bool = False,
    ) -> None:
        self.device = device
        self.num_bytes = num_bytes
        self.block: Block | None = None
        self.number: int | None = None
        self.shapes: torch.UntypedStorage | None = None
        self.tape = None if is_workspace else device.machine.tape
        self.taped = None if self.tape is None else self.tape.took(device, num_bytes)
        if num_bytes > 0:
            self.block = device.allocate_block(num_bytes)
            recorder = device.machine.recorder
            if recorder is not None and device.index is not None:
                source = None if copy_of is None else copy_of.number
                self.number = recorder.allocated(device.index, num_bytes, source, is_workspace=is_workspace)

    @property
    def address(self) -> int:
        """Where it lies in the device's address space; 0 if it has no bytes."""
        return 0 if self.block is None else self.block.address

    @property
    def block_bytes(self) -> int:
        """What it takes of the device, rounding included."""
        return 0 if self.block is None else self.block.size

    def __del__(self) -> None:
        block = getattr(self, "block", None)  # missing if __init__ ran out of memory
        if block is not None:
            self.device.allocator.release(block)
            if self.number is not None and self.device.machine.recorder is not None:
                self.device.machine.recorder.freed(self.number)
        tape = getattr(self, "tape", None)
        if tape is not None:
            tape.gave_back(self.taped)


class SimulatedDevice:
    """One device, `sim:<index>`, with memory of its own; without an index, the host `cpu`."""

    def __init__(
        self,
        index: int | None,
        capacity_bytes: int,
        *,
        expandable_segments: bool = False,
        compute_capability: Capability = DEFAULT_CAPABILITY,
    ) -> None:
        self.index = index
        self.name = "cpu" if index is None else f"{DEVICE_TYPE}:{index}"
        self.allocator = CachingAllocator(
            capacity_bytes,
            expandable_segments=expandable_segments,
            base_address=0 if index is None else (index + 1) * _ADDRESSES_PER_DEVICE,
        )
        self.torch_device = _torch_device(self.name)
        self.compute_capability = compute_capability
        self.counter = WorkCounter()
        """What it does in each phase."""
        self.machine: Machine
        self._matmul_workspace: Allocation | None = None

    @property
    def total_bytes(self) -> int:
        """Its capacity."""
        return self.allocator.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """What is not reserved of its capacity."""
        return self.allocator.free_bytes

    @property
    def use(self) -> MemoryUse:
        """Allocated and reserved bytes now."""
        return self.allocator.use

    @property
    def peak(self) -> MemoryUse:
        """The highest allocated and reserved bytes since the last `reset_peak`."""
        return self.allocator.peak

    @property
    def phases(self) -> dict[str, MemoryUse]:
        """The highest allocated and reserved bytes of each phase."""
        return self.allocator.phases

    def reset_peak(self) -> None:
        """Let `peak` start again from what is in use now."""
        self.allocator.reset_peak()

    @property
    def workspace_bytes(self) -> int:
        """What the matrix library keeps of the allocated bytes, 0 before its first use."""
        return 0 if self._matmul_workspace is None else self._matmul_workspace.num_bytes

    def open_matmul_library(self) -> None:
        """Take the workspace that cuBLAS keeps from its first use on."""
        if self.machine.tape is not None:
            self.machine.tape.opened_matmul_library(self)
        if self._matmul_workspace is None:
            num_bytes = matmul_workspace_bytes(self.compute_capability)
            self._matmul_workspace = Allocation(self, num_bytes, is_workspace=True)

    def allocate_block(self, num_bytes: int) -> Block:
        """A block of device memory. Raises torch.OutOfMemoryError as the CUDA allocator words it."""
        try:
            return self.allocator.allocate(num_bytes)
        except AllocatorOutOfMemoryError as error:
            import torch

            raise torch.OutOfMemoryError(error.describe(self.name)) from None

    def __repr__(self) -> str:
        return f"<{self.name} of {self.total_bytes} bytes>"


class Machine:
    """The devices of one simulation, the copies made between them, and the modules that ran."""

    def __init__(
        self,
        devices: Sequence[SimulatedDevice],
        numbers: Numbers,
        modules: ModuleTracker,
        recorder: Recorder | None = None,
    ) -> None:
        self.devices = tuple(devices)
        self.recorder = recorder
        self.host = SimulatedDevice(None, _HOST_BYTES)
        """Where offloaded weights lie whose numbers are unknown; other tensors of the CPU are PyTorch's own."""
        self.numbers = numbers
        self.modules = modules
        self.transfers: list[Transfer] = []
        self.tape: Tape | None = None
        """What is told of all that one function does, while it runs."""
        self._phase = ""
        for device in (*self.devices, self.host):
            device.machine = self

    def device(self, index: int | None) -> SimulatedDevice:
        """Device `index`, the first one for None. Raises RuntimeError as CUDA words it."""
        index = 0 if index is None else index
        if not 0 <= index < len(self.devices):
            raise RuntimeError(f"invalid device ordinal: {DEVICE_TYPE}:{index}, there are {len(self.devices)} devices")
        return self.devices[index]

    @property
    def current_phase(self) -> str:
        """The innermost `phase` that is entered, "" outside of all."""
        return self._phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record peaks and transfers within as those of phase `name`."""
        outer, self._phase = self._phase, name
        with ExitStack() as stack:
            for device in self.devices:
                stack.enter_context(device.allocator.phase(name))
            try:
                yield
            finally:
                self._phase = outer

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing within as work; memory is recorded as before."""
        outer, self._phase = self._phase, ""
        try:
            yield
        finally:
            self._phase = outer

    def empty_caches(self) -> None:
        """Let every device give back what its allocator keeps for later."""
        for device in self.devices:
            device.allocator.empty_cache()
        if self.tape is not None:
            self.tape.spoil()
        if self.recorder is not None:
            self.recorder.emptied()

    def record_transfer(self, source: str, target: str, num_bytes: int) -> None:
        """Note a copy; copies within one device and of nothing do not count."""
        if source != target and num_bytes:
            module = self.modules.current
            self.transfers.append(Transfer(source, target, num_bytes, module, self._phase))
            if self.tape is not None:
                self.tape.spoil()


def _torch_device(name: str) -> torch.device:
    import torch

    return torch.device(name)


_active: Machine | None = None


def active_machine() -> Machine:
    """The machine of the running simulation. Raises RuntimeError without one."""
    if _active is None:
        raise RuntimeError(f"no simulation is running: there are no {DEVICE_TYPE} devices")
    return _active


def num_active_devices() -> int:
    """How many simulated devices there are now."""
    return 0 if _active is None else len(_active.devices)


@contextmanager
def activated(machine: Machine) -> Iterator[Machine]:
    """Make `machine` the one that `sim` devices belong to. Raises RuntimeError if there is one already."""
    global _active
    if _active is not None:
        raise RuntimeError("a simulation is running already; they run one after the other")
    _active = machine
    try:
        with machine.modules:
            yield machine
    finally:
        _active = None
