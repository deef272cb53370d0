"""Fully qualified module names (fqns) and their ancestry."""

from __future__ import annotations

from collections.abc import Container, Iterable


def is_ancestor(ancestor: str, name: str) -> bool:
    """Whether the module `ancestor` is, or contains, what `name` names; the root is "".

    `layers.1` contains `layers.1.mlp` and not `layers.10`.
    """
    return ancestor in ("", name) or name.startswith(ancestor + ".")


def parent(name: str) -> str:
    """The fqn of the module that holds `name`; "" for a top-level one."""
    return name.rpartition(".")[0]


def join(prefix: str, name: str) -> str:
    """The fqn of `name` inside the module `prefix`."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def owner(name: str, candidates: Iterable[str]) -> str | None:
    """The longest of `candidates` that is, or contains, `name`; None where none does."""
    known = candidates if isinstance(candidates, Container) else set(candidates)
    while name and name not in known:
        name = parent(name)
    return name if name in known else None
