"""The layer tree of `devmap inspect`, equal layers folded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from devmap_cli.model.names import join
from devmap_cli.model.sizes import ModuleSize, Sizes, bytes_by_dtype, kv_bytes
from devmap_cli.model.spec import ModelSpec, ModuleSpec
from devmap_cli.units import format_bytes, format_count

_MANY_RANGES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the tree: a module, or several equal ones."""

    guide: str
    prefix: str
    names: tuple[str, ...]
    fqn: str
    module: ModuleSpec

    @property
    def title(self) -> str:
        """Guide lines and name: `├── layers.0-27`."""
        return self.guide + join(self.prefix, name_ranges(self.names))


def layer_tree(spec: ModelSpec, *, depth: int | None = None, expand: bool = False) -> RenderableType:
    """The tree of `spec` and a summary below it.

    Args:
        depth: levels below the root to show; None shows all down to the modules that may not be split.
        expand: show each of several equal layers.
    """
    sizes = Sizes.of(spec)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("module", no_wrap=True, min_width=16)
    table.add_column("class", no_wrap=True, style="cyan")
    table.add_column("parameters", justify="right", no_wrap=True, min_width=10)
    table.add_column("size", justify="right", no_wrap=True, min_width=14)
    table.add_column("share", justify="right", no_wrap=True, min_width=7)
    table.add_column("", no_wrap=True, style="dim")
    for row in rows(spec, depth=depth, expand=expand):
        table.add_row(*_cells(row, spec, sizes))
    return Group(table, Text(), summary(spec))


def rows(spec: ModelSpec, *, depth: int | None = None, expand: bool = False) -> Iterator[Row]:
    """The lines of the tree, depth first."""
    yield Row("", "", (spec.class_name,), "", spec.root)
    yield from _below(spec.root, "", "", depth, expand)


def _below(module: ModuleSpec, fqn: str, indent: str, depth: int | None, expand: bool) -> Iterator[Row]:
    if depth == 0 or (depth is None and module.no_split):
        return
    groups = list(_groups(module, expand))
    for position, (prefix, group) in enumerate(groups):
        first, is_last = group[0], position == len(groups) - 1
        child_fqn = join(fqn, join(prefix, first.name))
        names = tuple(child.name for child in group)
        yield Row(indent + ("└── " if is_last else "├── "), prefix, names, child_fqn, first)
        deeper = None if depth is None else depth - 1
        yield from _below(first, child_fqn, indent + ("    " if is_last else "│   "), deeper, expand)


def _groups(module: ModuleSpec, expand: bool) -> Iterator[tuple[str, tuple[ModuleSpec, ...]]]:
    """The children of `module`, a list's elements in place of the list and equal ones together, each with a prefix."""
    for child in module.children:
        if child.class_name != "ModuleList" or child.tensors or not child.children:
            yield "", (child,)
            continue
        alike: dict[object, list[ModuleSpec]] = {}
        for element in child.children:
            likeness = (element.class_name, element.tensors, element.children)
            alike.setdefault(element.name if expand else likeness, []).append(element)
        yield from ((child.name, tuple(group)) for group in alike.values())


def name_ranges(names: tuple[str, ...]) -> str:
    """Numbered names as ranges: `0-27`, `0-2,4-6`, shortened where there are many."""
    if len(names) == 1:
        return names[0]
    ranges: list[list[int]] = []
    for number in map(int, names):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in ranges]
    return ",".join(texts if len(texts) <= _MANY_RANGES else [*texts[:2], "…", texts[-1]])


def _cells(row: Row, spec: ModelSpec, sizes: Sizes) -> tuple[str, ...]:
    size, count, total = sizes[row.fqn], len(row.names), sizes.total.num_bytes or 1
    each = " each" if count > 1 else ""
    return (
        row.title,
        f"{count} × {row.module.class_name}" if count > 1 else row.module.class_name,
        format_count(size.num_parameters) if size.num_parameters else "",
        format_bytes(size.num_bytes) + each if size.num_bytes else "",
        f"{100 * size.num_bytes * count / total:.1f} %" if size.num_bytes else "",
        _remark(row, spec, size),
    )


def _remark(row: Row, spec: ModelSpec, size: ModuleSize) -> str:
    direct = {join(row.fqn, tensor.name) for tensor in row.module.tensors}
    owner = next((group[0] for group in spec.ties if direct & set(group[1:])), None)
    if owner is not None:
        return f"tied to {owner}"
    if size.buffer_bytes and not size.num_parameters:
        return "buffers only"
    return "no split" if row.module.no_split else ""


def summary(spec: ModelSpec) -> RenderableType:
    """Totals, dtypes, ties, no-split classes, KV cache and buffers of `spec`."""
    total = Sizes.of(spec).total
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("total", f"{format_count(total.num_parameters)} parameters, {format_bytes(total.num_bytes)}")
    table.add_row("dtypes", ", ".join(f"{name} {format_bytes(size)}" for name, size in bytes_by_dtype(spec).items()))
    table.add_row("tied weights", "; ".join(" = ".join(group) for group in spec.ties) or "none")
    table.add_row("no split", ", ".join(no_split_classes(spec)) or "no class is marked")
    table.add_row("KV cache", _kv_text(spec))
    table.add_row("buffers", _buffers_text(spec, total))
    for note in spec.notes:
        table.add_row("note", note)
    return table


def no_split_classes(spec: ModelSpec) -> list[str]:
    """Class names, in module order, of the modules that may not be split."""
    return list(dict.fromkeys(module.class_name for _, module in spec.modules() if module.no_split))


def _kv_text(spec: ModelSpec) -> str:
    if spec.kv_cache is None:
        return "unknown"
    if not spec.kv_cache:
        return "none (the model keeps no cache)"
    per_token = sum(layer.bytes_per_token for layer in spec.kv_cache)
    fixed = sum(layer.fixed_bytes for layer in spec.kv_cache)
    windows = sorted({layer.max_tokens for layer in spec.kv_cache if layer.max_tokens is not None})
    text = f"{format_bytes(per_token)} per token and sequence"
    if windows:
        limited = sum(layer.max_tokens is not None for layer in spec.kv_cache)
        text += f" ({limited} of {len(spec.kv_cache)} layers keep at most {', '.join(map(str, windows))} tokens)"
    if fixed:
        text += f", and {format_bytes(fixed)} whatever the length"
    return f"{text}; {format_bytes(kv_bytes(spec, 4096) or 0)} at 4,096 tokens"


def _buffers_text(spec: ModelSpec, total: ModuleSize) -> str:
    count = sum(tensor.is_buffer for _, tensor in spec.tensors())
    return f"{count}, {format_bytes(total.buffer_bytes)}" if count else "none"
