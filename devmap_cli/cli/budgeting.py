"""From --max-memory, --gpus, --reserve and --no-offload to budgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from devmap_cli.errors import RequestError

if TYPE_CHECKING:
    from devmap_cli.devices.budgets import Budgets
    from devmap_cli.devices.cards import Card
    from devmap_cli.devices.detection import DetectedDevice
    from devmap_cli.devices.device import Device
    from devmap_cli.units import Amount


def cards_from_option(gpus: str | None) -> dict[Device, Card]:
    """The cards that --gpus names; none without it, and then the table is not read.

    Raises:
        RequestError: it cannot be read.
    """
    if gpus is None:
        return {}
    from devmap_cli.devices.cards import parse_gpus

    return parse_gpus(gpus)


def local_cards() -> dict[Device, Card]:
    """The cards of this machine's accelerators, those whose names the table has; memory decides between several."""
    from devmap_cli.devices.cards import cards_named
    from devmap_cli.devices.detection import detect

    found = {}
    for item in detect():
        named = cards_named(item.name) if item.device.is_accelerator else ()
        if named:
            found[item.device] = min(named, key=lambda card: abs(card.usable_bytes - item.total_bytes))
    return found


def refuse_old_cards(attention: str, quantization: dict[str, Any] | None, cards: Iterable[Card]) -> None:
    """Refuse an attention or a quantization that one of `cards` is too old for.

    Raises:
        RequestError: naming the card.
    """
    from devmap_cli.devices.capability import FLASH_CAPABILITY
    from devmap_cli.model.quantization.scheme import least_capability

    method, least = least_capability(quantization)
    for card in cards:
        own = card.compute_capability
        if own is None:
            continue
        has = f"and {card.name} has {own[0]}.{own[1]}"
        if attention == "flash_attention_2" and own < FLASH_CAPABILITY:
            major, minor = FLASH_CAPABILITY
            raise RequestError(
                f"FlashAttention 2 runs from compute capability {major}.{minor} on, {has}", "--attention sdpa"
            )
        if own < least:
            raise RequestError(
                f"{method} weights run from compute capability {least[0]}.{least[1]} on, {has}",
                "take newer cards, or weights of another kind",
            )


def budgets_from_options(
    max_memory: str | None, reserve: list[str], *, no_offload: bool, cards: Mapping[Device, Card] = MappingProxyType({})
) -> Budgets:
    """Budgets from the command line, asking the machine only for what the options leave open.

    Args:
        cards: accelerators of another machine, in place of this one's.

    Raises:
        RequestError: an option that cannot be read, or no device left.
        SurroundingsError: a share of a device that is not here.
    """
    from devmap_cli.devices.budgets import parse_max_memory, parse_reserves, resolve_budgets
    from devmap_cli.units import Amount

    reserves = parse_reserves(reserve)
    totals = {device: card.usable_bytes for device, card in cards.items()}
    if cards:
        amounts = {device: Amount(size) for device, size in totals.items()}
        amounts |= _tiers_beside_cards({} if max_memory is None else parse_max_memory(max_memory), reserves)
    elif max_memory is None:
        found = _detected(None)
        totals = {item.device: item.shared_bytes for item in found}
        amounts = {item.device: Amount(item.free_bytes) for item in found}
    else:
        amounts = parse_max_memory(max_memory)
        relative = [device for device in amounts if _is_relative(device, amounts, reserves)]
        totals = {item.device: item.shared_bytes for item in (_detected(relative) if relative else ())}
    if no_offload:
        amounts = {device: amount for device, amount in amounts.items() if device.is_accelerator}
        if not amounts:
            raise RequestError(
                "--no-offload leaves no device: no accelerator is named or found",
                "name the devices: --max-memory '0:24GB'",
            )
    return resolve_budgets(amounts, reserves, totals)


def _detected(kinds: list[Device] | None) -> tuple[DetectedDevice, ...]:
    from devmap_cli.devices.detection import detect

    return detect(kinds)


def _tiers_beside_cards(amounts: dict[Device, Amount], reserves: dict[Device, Amount]) -> dict[Device, Amount]:
    """What --max-memory may say beside --gpus: how much RAM and disk that machine has, in bytes.

    Raises:
        RequestError: it names an accelerator, or a share of what only that machine knows.
    """
    from devmap_cli.devices.budgets import share_and_bytes
    from devmap_cli.units import Amount

    for device in amounts:
        if device.is_accelerator:
            raise RequestError(
                f"--max-memory names {device.label}, but --gpus says what the accelerators are",
                "give only cpu and disk beside --gpus, like --max-memory 'cpu:30GB', and keep room with --reserve",
            )
        if _is_relative(device, amounts, reserves):
            share, example = share_and_bytes(device, amounts[device], reserves.get(device, Amount()))
            raise RequestError(
                f"--gpus plans for another machine, so {share} of its {device} is unknown",
                f"give it in bytes, for example {example}",
            )
    return amounts


def _is_relative(device: Device, amounts: dict[Device, Amount], reserves: dict[Device, Amount]) -> bool:
    return amounts[device].is_relative or (device in reserves and reserves[device].is_relative)
