"""`devmap plan MODEL`."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from devmap_cli.cli.options import DtypeOption, Json, Model, QuantizeOption, Revision, Strategy, TrustRemoteCode
from devmap_cli.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from devmap_cli.devices.budgets import Budgets
    from devmap_cli.devices.cards import Card
    from devmap_cli.devices.device import Device
    from devmap_cli.mapfile import MapFile
    from devmap_cli.units import Amount


def plan(
    model: Model,
    strategy: Annotated[
        Strategy,
        typer.Option(
            "--strategy",
            help="balanced: the smallest highest use over the GPUs; auto: the same while all fits there, else the "
            "least is offloaded; balanced_low_0: as little as possible on the first GPU; sequential: filled in order; "
            "fewest: as few GPUs as hold it.",
        ),
    ] = Strategy.auto,
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            metavar="DEVICE:SIZE,…",
            help="What the process may take, like '0:10GB,1:80%,cpu:-2GiB'; without it, what is free on this machine.",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="COUNTxCARD,…",
            help="Plan for these cards, like '2xT4,1xA10', not for this machine; --max-memory can add cpu and disk.",
        ),
    ] = None,
    reserve: Annotated[
        list[str] | None,
        typer.Option("--reserve", metavar="DEVICE=SIZE", help="Keep this much free; repeatable."),
    ] = None,
    no_offload: Annotated[bool, typer.Option("--no-offload", help="Use neither cpu nor disk.")] = False,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Let budgets cap weights alone, as accelerate's max_memory does."),
    ] = False,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="MODULE=DEVICE", help="Place a module, glob or {0..9} range; repeatable."),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option("--rules", metavar="FILE", help="Pins from a file, one MODULE=DEVICE a line."),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option("--weight", metavar="DEVICE=FACTOR", help="Count a GPU as a part, like 0=0.5; repeatable."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of the prompt.")] = 2048,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Length of the answer.")] = 256,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Sequences at once.")] = 1,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where the map goes, - for stdout; map.json by default."),
    ] = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Decide where each part of a model goes and write the map. Needs no weights and no GPU."""
    from devmap_cli.mapfile import MapWorkload, write_map
    from devmap_cli.model.load import load_spec
    from devmap_cli.planning.nouns import Infeasible
    from devmap_cli.planning.pins import load_rules, parse_pin, parse_weights
    from devmap_cli.planning.planner import PlanRequest, make_plan, map_file

    cards = cards_from_option(gpus)
    pins = (*(load_rules(rules) if rules else ()), *map(parse_pin, pin or ()))
    request = PlanRequest(
        strategy.value,
        budgets_from_options(max_memory, reserve or [], no_offload=no_offload, cards=cards),
        MapWorkload(batch_size=batch_size, prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens),
        pins,
        parse_weights(weight or []),
        weights_only,
    )
    spec = load_spec(
        model,
        revision=revision,
        dtype=dtype.value if dtype else None,
        quantize=quantize.value if quantize else None,
        trust_remote_code=trust_remote_code,
    )
    placement = make_plan(spec, request)
    if isinstance(placement, Infeasible):
        from devmap_cli.cli.refusal import refuse

        refuse(placement, spec, request, gpus=gpus, as_json=as_json)
    document = map_file(spec, request, placement)
    target = ("-" if as_json else "map.json") if output is None else output
    write_map(document, target)
    if as_json and output not in (None, "-"):
        write_map(document, "-")
    if not as_json:
        from devmap_cli.planning.explaining import unused_accelerators
        from devmap_cli.render.plan import plan_notes

        names = {device: card.name for device, card in cards.items()}
        notes = plan_notes(spec, document, unused_accelerators(placement), weights_only=weights_only)
        _show(document, target, notes=notes, names=names)


def cards_from_option(gpus: str | None) -> dict[Device, Card]:
    """The cards that --gpus names; none without it, and then the table is not read.

    Raises:
        RequestError: it cannot be read.
    """
    if gpus is None:
        return {}
    from devmap_cli.devices.cards import parse_gpus

    return parse_gpus(gpus)


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
    from devmap_cli.devices.detection import detect
    from devmap_cli.units import Amount

    reserves = parse_reserves(reserve)
    totals = {device: card.usable_bytes for device, card in cards.items()}
    if cards:
        amounts = {device: Amount(size) for device, size in totals.items()}
        amounts |= _tiers_beside_cards({} if max_memory is None else parse_max_memory(max_memory), reserves)
    elif max_memory is None:
        found = detect()
        totals = {item.device: item.shared_bytes for item in found}
        amounts = {item.device: Amount(item.free_bytes) for item in found}
    else:
        amounts = parse_max_memory(max_memory)
        relative = [device for device in amounts if _is_relative(device, amounts, reserves)]
        totals = {item.device: item.shared_bytes for item in (detect(relative) if relative else ())}
    if no_offload:
        amounts = {device: amount for device, amount in amounts.items() if device.is_accelerator}
        if not amounts:
            raise RequestError(
                "--no-offload leaves no device: no accelerator is named or found",
                "name the devices: --max-memory '0:24GB'",
            )
    return resolve_budgets(amounts, reserves, totals)


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


def _show(document: MapFile, target: str, *, notes: list[str], names: Mapping[Device, str]) -> None:
    from devmap_cli.render.console import err, out
    from devmap_cli.render.plan import BAR_WIDTH, DeviceTable, layer_bar

    console = err() if target == "-" else out()
    console.print(DeviceTable(document, names))
    console.print()
    console.print(layer_bar(document, min(BAR_WIDTH, console.width)))
    for note in notes:
        console.print(note)
    if target != "-":
        err().print(f"wrote {target}")
