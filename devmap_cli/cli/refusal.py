"""The answer "no" of `devmap plan`: what is missing, and commands that would fit, each tried beforehand."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import typer

from devmap_cli.cli import fail
from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU
from devmap_cli.errors import EXIT_NO
from devmap_cli.model.spec import ModelSpec
from devmap_cli.planning.nouns import Infeasible, Placement
from devmap_cli.planning.planner import PlanRequest, make_plan
from devmap_cli.units import format_bytes

_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20, "B": 1}


def refuse(answer: Infeasible, spec: ModelSpec, request: PlanRequest, *, gpus: str | None, as_json: bool) -> NoReturn:
    """Say why nothing fits, on stdout too with `as_json`, and exit with code 1.

    Args:
        gpus: the value of --gpus, for commands to try that keep it.
    """
    if as_json:
        typer.echo(json.dumps(infeasible_document(answer), indent=2))
    place = f" on {answer.device.label}" if answer.device else ""
    message = (
        f"{spec.model_id} does not fit{place}: needed {format_bytes(answer.needed_bytes)}, "
        f"budget {format_bytes(answer.budget_bytes)}, missing {format_bytes(answer.missing_bytes)}: {answer.reason}"
    )
    raise typer.Exit(fail(EXIT_NO, message, _ways_out(answer, spec, request, gpus)))


def infeasible_document(answer: Infeasible) -> dict[str, Any]:
    """The answer "no" as plain data."""
    return {
        "format": "devmap.infeasible/1",
        "strategy": answer.strategy,
        "reason": answer.reason,
        "device": None if answer.device is None else answer.device.map_value,
        "needed_bytes": answer.needed_bytes,
        "budget_bytes": answer.budget_bytes,
        "missing_bytes": answer.missing_bytes,
        "grow_device": None if answer.grow_device is None else answer.grow_device.map_value,
    }


def _ways_out(answer: Infeasible, spec: ModelSpec, request: PlanRequest, gpus: str | None) -> str:
    plan = f"devmap plan {shlex.quote(spec.model_id)}"
    ways = [
        f"{plan} {_as_options(budgets, gpus)}"
        for budgets in _larger(answer, request.budgets, gpus)
        if isinstance(make_plan(spec, replace(request, budgets=budgets)), Placement)
    ]
    if spec.dtype == "float32":
        ways.append("half the weights: --dtype bfloat16")
    if spec.quantization is None and request.budgets.accelerators:
        ways.append("a quarter of them: --quantize nf4")
    return "; or ".join(ways) or "give more memory or another device"


def _larger(answer: Infeasible, budgets: Budgets, gpus: str | None) -> Iterator[Budgets]:
    """Budgets to try: RAM for all that is missing, and more on the one device that needs least."""
    sizes, reserved = dict(budgets), dict(budgets.reserved)
    if not budgets.tiers:
        yield Budgets.of({**sizes, CPU: _rounded_up(answer.needed_bytes)}, reserved)
    if gpus is None and answer.grow_device is not None:
        grown = _rounded_up(sizes.get(answer.grow_device, 0) + answer.missing_bytes)
        yield Budgets.of({**sizes, answer.grow_device: grown}, reserved)


def _rounded_up(num_bytes: int) -> int:
    """The next tenth of a GB, or whole MB below one GB."""
    step = 10**8 if num_bytes > 10**9 else 10**6
    return -(-num_bytes // step) * step


def _as_options(budgets: Budgets, gpus: str | None) -> str:
    items = [(device, size) for device, size in budgets if gpus is None or not device.is_accelerator]
    text = ",".join(f"{device.map_value}:{_size(budgets.whole(device))}" for device, _ in items)
    options = [f"--gpus {shlex.quote(gpus)}"] if gpus else []
    options += [f"--max-memory {shlex.quote(text)}"] if text else []
    options += [f"--reserve {device.map_value}={_size(size)}" for device, size in budgets.reserved]
    return " ".join(options)


def _size(num_bytes: int) -> str:
    """The size in the largest unit in which it has at most one decimal."""
    unit = next(
        name for name, size in _UNITS.items() if size == 1 or (num_bytes >= size and num_bytes * 10 % size == 0)
    )
    return f"{num_bytes / _UNITS[unit]:g}{unit}" if unit != "B" else f"{num_bytes}B"
