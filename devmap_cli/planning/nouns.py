"""What planners take and give back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import Device, main_device


@dataclass(frozen=True, slots=True)
class Block:
    """What is placed as one: a no-split module, or modules that share weights, in execution order.

    Args:
        fqns: module names, the first naming the block; more than one where weights are tied.
        weights_bytes: parameters and buffers, shared ones once.
        kv_cache_bytes: KV cache at the workload's final length.
        transient_bytes: the most that its forward needs beyond weights and KV cache, with the cache at its final
            length; blocks run one after another, so a device needs the largest of them only.
        fixed: the device it must go to (a pin), or None.
        streamed_bytes: the most weights that a single module in it holds itself; offloaded weights are brought to the
            computing device module by module (accelerate's AlignDevicesHook), so that much must have room there.
        load_transient_bytes: the most that loading it needs beyond weights.
        prompt_kv_cache_bytes: KV cache of the prompt alone.
        prompt_transient_bytes: the most that the prompt's forward needs beyond weights and that KV cache.
    """

    fqns: tuple[str, ...]
    weights_bytes: int
    kv_cache_bytes: int = 0
    transient_bytes: int = 0
    fixed: Device | None = None
    streamed_bytes: int = 0
    load_transient_bytes: int = 0
    prompt_kv_cache_bytes: int = 0
    prompt_transient_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """What it takes all the time."""
        return self.weights_bytes + self.kv_cache_bytes

    @property
    def largest_transient_bytes(self) -> int:
        """The most that it needs beyond what is resident at the end, counted in any phase."""
        return max(
            self.transient_bytes,
            self.load_transient_bytes - self.kv_cache_bytes,
            self.prompt_kv_cache_bytes + self.prompt_transient_bytes - self.kv_cache_bytes,
        )


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """What one device will take, in bytes: the parts add up to `peak_bytes`."""

    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    activation_bytes: int = 0
    overhead_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that the device takes at any time."""
        return self.weights_bytes + self.kv_cache_bytes + self.activation_bytes + self.overhead_bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """One step of a planner: a block, the device it went to, why, and bytes: the device's before and after, and those
    that the block takes there all the time."""

    block: str
    device: Device
    reason: str
    held_bytes: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A device for each block, in the blocks' order."""

    strategy: str
    blocks: tuple[Block, ...]
    devices: tuple[Device, ...]
    budgets: Budgets
    overhead_bytes: dict[Device, int] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    measured: Mapping[Device, MemoryBreakdown] = field(default_factory=dict)
    """What devices take by a rehearsal, where there was one."""

    @property
    def used_devices(self) -> tuple[Device, ...]:
        """The devices that hold a block, in budget order."""
        used = set(self.devices)
        return tuple(device for device in self.budgets.devices if device in used)

    @property
    def num_hops(self) -> int:
        """How often execution goes on on another device."""
        return sum(1 for before, after in pairwise(self.devices) if before != after)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of weights on cpu and disk."""
        places = zip(self.blocks, self.devices, strict=True)
        return sum(block.weights_bytes for block, place in places if not place.is_accelerator)

    @property
    def overfull_stores(self) -> list[Device]:
        """Those of cpu and disk that what lies there is too much for, which judges of accelerators don't see."""
        stores = [device for device in set(self.devices) if not device.is_accelerator]
        return [device for device in stores if self.memory(device).peak_bytes > self.budgets.get(device)]

    @property
    def main_device(self) -> Device:
        """The device that computes for the blocks on cpu and disk."""
        return main_device(self.devices)

    def memory(self, device: Device, *, held_only: bool = False) -> MemoryBreakdown:
        """What `device` takes, by a rehearsal or else by adding up its blocks; no overhead where it holds nothing.

        With `held_only` what it computes for offloaded blocks is left out, and the rehearsal too: it is what a planner
        adds up. KV cache and activations are where a block computes, which for an offloaded one is the main device; the
        weights that it brings there while it runs count as activations.
        """
        if device in self.measured and not held_only:
            return self.measured[device]
        places = list(zip(self.blocks, self.devices, strict=True))
        held = [block for block, place in places if place == device]
        computed = [
            (block, place) for block, place in places if (place if held_only else self._computes(place)) == device
        ]
        if not held and not computed:
            return MemoryBreakdown()
        streamed = max((block.streamed_bytes for block, place in computed if place != device), default=0)
        weights = sum(block.weights_bytes for block in held)
        load = max((block.load_transient_bytes for block in held), default=0)
        prompt_cache, prompt = 0, 0
        for block, _ in computed:
            prompt_cache += block.prompt_kv_cache_bytes
            prompt = max(prompt, prompt_cache + block.prompt_transient_bytes)
        final_cache = sum(block.kv_cache_bytes for block, _ in computed)
        final = final_cache + max((block.transient_bytes for block, _ in computed), default=0)
        peak, cache = max((final + streamed, final_cache), (prompt + streamed, prompt_cache), (load, 0))
        return MemoryBreakdown(
            weights_bytes=weights,
            kv_cache_bytes=min(cache, peak),
            activation_bytes=peak - min(cache, peak),
            overhead_bytes=self.overhead_bytes.get(device, 0),
        )

    def _computes(self, place: Device) -> Device:
        return place if place.is_accelerator else self.main_device


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The answer "no": how much more memory would make it fit, and why.

    `device` is the one that needs least more, with the others as they are; None where no device of its kind has a
    budget at all. `needed_bytes` is what it would have to have, `budget_bytes` what it has, and `missing_bytes` the
    difference.
    """

    strategy: str
    reason: str
    needed_bytes: int
    budget_bytes: int
    device: Device | None = None

    @property
    def missing_bytes(self) -> int:
        """What, added to the budget of the device alone, makes it fit."""
        return self.needed_bytes - self.budget_bytes
