"""Descriptions of models kept between runs, so that a plan from a warm cache imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from devmap_cli import __version__
from devmap_cli.files import atomic_write
from devmap_cli.installed import installed_version
from devmap_cli.model.spec import KvCacheSpec, ModelSpec, ModuleSpec, TensorSpec

_SPECS = "specs"
_FORMAT = 7
"""Raised with every change of what is kept that the version of devmap doesn't tell."""
PACKAGES = ("transformers", "torch", "accelerate")


def cache_folder() -> Path:
    """Where devmap keeps what it may lose: DEVMAP_CACHE, else the user's cache folder."""
    if chosen := os.environ.get("DEVMAP_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "devmap"


def package_versions() -> dict[str, str]:
    """Versions of devmap and of the packages a description depends on, without importing them."""
    return {"devmap": __version__, **{package: installed_version(package) or "missing" for package in PACKAGES}}


def key_of(*parts: object) -> str:
    """A name for what depends on `parts` and on the versions of all packages, and on nothing else."""
    text = json.dumps([_FORMAT, parts, package_versions()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_spec(key: str) -> ModelSpec | None:
    """The description kept under `key`; None where there is none, or a damaged one."""
    document = read_document(_SPECS, key)
    try:
        return None if document is None else _spec_from(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_spec(key: str, spec: ModelSpec) -> None:
    """Keep `spec` under `key`; a cache that cannot be written is no failure."""
    write_document(_SPECS, key, asdict(spec))


def read_document(folder: str, key: str) -> Any:
    """The plain data kept in `folder` under `key`; None where there is none, or damaged data."""
    try:
        return json.loads(_path(folder, key).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_document(folder: str, key: str, document: Mapping[str, Any]) -> None:
    """Keep plain data; a cache that cannot be written is no failure."""
    try:
        _path(folder, key).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(_path(folder, key), json.dumps(document, separators=(",", ":")).encode())
    except Exception:  # noqa: BLE001, S110 - whatever the disk says, the answer is there without the cache
        pass


def _path(folder: str, key: str) -> Path:
    return cache_folder() / folder / f"{key}.json"


def _spec_from(document: dict[str, Any]) -> ModelSpec:
    kv_cache = document.pop("kv_cache")
    return ModelSpec(
        root=_module_from(document.pop("root")),
        ties=tuple(map(tuple, document.pop("ties"))),
        execution_order=tuple(document.pop("execution_order")),
        kv_cache=None if kv_cache is None else tuple(KvCacheSpec(**entry) for entry in kv_cache),
        renamings=tuple(map(tuple, document.pop("renamings"))),
        notes=tuple(document.pop("notes")),
        **document,
    )


def _module_from(document: dict[str, Any]) -> ModuleSpec:
    return ModuleSpec(
        document["name"],
        document["class_name"],
        tuple(_tensor_from(entry) for entry in document["tensors"]),
        tuple(_module_from(entry) for entry in document["children"]),
        document["no_split"],
    )


def _tensor_from(entry: dict[str, Any]) -> TensorSpec:
    return TensorSpec(entry["name"], tuple(entry["shape"]), entry["dtype"], entry["num_bytes"], entry["is_buffer"])
