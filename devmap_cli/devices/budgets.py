"""What a process may take on each device: the `--max-memory` grammar, reserves, and what is left to place into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from devmap_cli.devices.device import CPU, DEVICES_HINT, DISK, Device, DeviceError
from devmap_cli.errors import RequestError, SurroundingsError
from devmap_cli.units import UNITS_HELP, Amount, SizeError, parse_amount


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes to place into per device, accelerators first in the order given, then cpu, then disk.

    `reserved` is what the process may take beyond that: room kept free of what is planned.
    """

    by_device: tuple[tuple[Device, int], ...]
    reserved: tuple[tuple[Device, int], ...] = ()

    @classmethod
    def of(cls, bytes_by_device: Mapping[Device, int], reserved: Mapping[Device, int] | None = None) -> Budgets:
        """Budgets in placing order from `bytes_by_device` (bytes), whatever its order of cpu and disk."""
        tiers = [device for device in (CPU, DISK) if device in bytes_by_device]
        order = [device for device in bytes_by_device if device.is_accelerator] + tiers
        return cls(tuple((device, bytes_by_device[device]) for device in order), tuple((reserved or {}).items()))

    def __iter__(self) -> Iterator[tuple[Device, int]]:
        return iter(self.by_device)

    def __getitem__(self, device: Device) -> int:
        return dict(self.by_device)[device]

    def get(self, device: Device) -> int:
        """The budget of `device` in bytes; 0 where it has none."""
        return dict(self.by_device).get(device, 0)

    def less(self, kept: Mapping[Device, int]) -> Budgets:
        """These budgets less what is `kept` free (bytes), never below zero."""
        left = tuple((device, max(0, size - kept.get(device, 0))) for device, size in self.by_device)
        return Budgets(left, self.reserved)

    def without_tiers(self) -> Budgets:
        """The budgets of the accelerators alone."""
        return Budgets(tuple((device, size) for device, size in self.by_device if device.is_accelerator), self.reserved)

    def more(self, device: Device, num_bytes: int) -> Budgets:
        """These budgets with `num_bytes` more on one device."""
        return Budgets(
            tuple((other, size + num_bytes if other == device else size) for other, size in self.by_device),
            self.reserved,
        )

    def whole(self, device: Device) -> int:
        """All that the process may take on `device`, in bytes: what is placed into and what is reserved."""
        return self.get(device) + dict(self.reserved).get(device, 0)

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices in placing order."""
        return tuple(device for device, _ in self.by_device)

    @property
    def accelerators(self) -> tuple[Device, ...]:
        """The devices that compute."""
        return tuple(device for device in self.devices if device.is_accelerator)

    @property
    def tiers(self) -> tuple[Device, ...]:
        """The places to offload to: cpu and disk, whichever are allowed."""
        return tuple(device for device in self.devices if not device.is_accelerator)


def parse_max_memory(text: str, option: str = "--max-memory", separator: str = ":") -> dict[Device, Amount]:
    """Read `0:10GB,cuda:1:80%,cpu:-2GiB`: items DEVICE:SIZE, where the last colon splits.

    Args:
        option: what to call it in errors.
        separator: what stands between DEVICE and SIZE; a colon is understood too.

    Raises:
        RequestError: naming the very item that is wrong, with the whole value corrected where that can be guessed.
    """
    items = [item.strip() for item in text.split(",")]
    amounts: dict[Device, Amount] = {}
    for position, item in enumerate(items):

        def corrected(replacement: str, position: int = position) -> str:
            return f"{option} '{','.join([*items[:position], replacement, *items[position + 1 :]])}'"

        name, found, size = item.rpartition(separator if separator in item else ":")
        if not item:
            example = ",".join(filter(None, items)) or f"0{separator}10GB,1{separator}10GB,cpu{separator}30GB"
            raise RequestError(f"{option}: an item is empty in {text!r}", f"{option} '{example}'")
        if not found or not name or "=" in item.replace(separator, "") or _is_device(item):
            guess = _as_item(item, separator, items)
            raise RequestError(f"{option}: {item!r} is not DEVICE{separator}SIZE", f"for example {corrected(guess)}")
        try:
            device, amount = Device.parse(name), parse_amount(size)
        except DeviceError as error:
            raise RequestError(f"{option}: in {item!r}: {error}", DEVICES_HINT) from None
        except SizeError as error:
            hint = f"which unit is meant? for example {corrected(f'{name}{found}{error.suggestion}')}; {UNITS_HELP}"
            raise RequestError(f"{option}: in {item!r}: {error}", hint) from None
        if device in amounts:
            raise RequestError(f"{option}: {item!r} names {device} a second time", "give each device once")
        amounts[device] = amount
    _check_kinds(amounts, option)
    return amounts


def _check_kinds(devices: Iterable[Device], option: str) -> None:
    """Refuse accelerators of several kinds: PyTorch drives those of one kind alone."""
    first_of: dict[str, str] = {}
    for device in devices:
        if device.is_accelerator:
            first_of.setdefault(device.kind, str(device.map_value))
    if len(first_of) > 1:
        raise RequestError(
            f"{option} mixes kinds of accelerators ({', '.join(first_of.values())}), and a model runs on one kind",
            "name all of one kind: 0,1 or npu:0,npu:1",
        )


def parse_reserves(items: Iterable[str]) -> dict[Device, Amount]:
    """Read items DEVICE=SIZE of `--reserve`, each of which may hold several, comma-separated.

    Raises:
        RequestError: naming the very item that is wrong.
    """
    joined = ",".join(items)
    if not joined:
        return {}
    return parse_max_memory(joined, option="--reserve", separator="=")


def _is_device(text: str) -> bool:
    try:
        Device.parse(text)
    except DeviceError:
        return False
    return True


def _as_item(item: str, separator: str, items: Iterable[str]) -> str:
    """The DEVICE:SIZE that a lone size or a lone device was probably meant to be; a size gets a number not taken."""
    lone = item.strip(":=")
    if "=" in lone:
        return lone.replace("=", separator)
    if not _is_device(lone):
        taken = {name.rpartition(separator)[0].strip().lower().removeprefix("cuda:") for name in items}
        free = next(number for number in map(str, count()) if number not in taken)
        return f"{free}{separator}{lone}"
    return f"{lone}{separator}10GB"


def share_and_bytes(device: Device, amount: Amount, reserve: Amount) -> tuple[str, str]:
    """Which of a budget and its reserve depends on what the device has, in words, and the option that would not."""
    if amount.is_relative:
        return f"{amount} (--max-memory)", f"--max-memory '{device.map_value}:10GB'"
    return f"{reserve} (--reserve)", f"--reserve '{device.map_value}=2GB'"


def resolve_budgets(
    amounts: Mapping[Device, Amount], reserves: Mapping[Device, Amount], totals: Mapping[Device, int]
) -> Budgets:
    """Turn amounts into bytes, keeping `reserves` free.

    Args:
        amounts: what was asked for, per device.
        reserves: what to keep free, per device; a relative reserve refers to the device's total.
        totals: bytes that the machine's devices have; needed only for devices with a relative amount.

    Raises:
        RequestError: a reserve for a device without budget.
        SurroundingsError: a relative amount for a device that this machine does not have.
    """
    stray = [device for device in reserves if device not in amounts]
    if stray:
        raise RequestError(
            f"--reserve names {stray[0].label}, which has no budget",
            f"devices with a budget: {', '.join(str(device.map_value) for device in amounts)}",
        )
    left: dict[Device, int] = {}
    reserved: dict[Device, int] = {}
    for device, amount in amounts.items():
        reserve = reserves.get(device, Amount())
        if (amount.is_relative or reserve.is_relative) and device not in totals:
            share, example = share_and_bytes(device, amount, reserve)
            raise SurroundingsError(
                f"{device.label} is not on this machine, so {share} of it is unknown",
                f"give it in bytes, for example {example}",
            )
        total = totals.get(device, 0)
        whole = amount.of(total)
        left[device] = max(0, whole - reserve.of(total))
        reserved[device] = whole - left[device]
    return Budgets.of(left, {device: size for device, size in reserved.items() if size})
