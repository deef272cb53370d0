"""The dtype that a checkpoint is stored in, for a config that states none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from devmap_cli.model.cache import key_of, read_document, write_document
from devmap_cli.model.checkpoint import FLOATS, first_float_dtype

if TYPE_CHECKING:
    from devmap_cli.model.reference import ModelReference

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FOLDER = "stored_dtypes"
_TIMEOUT_SECONDS = 10.0


def stored_dtype(reference: ModelReference) -> str | None:
    """The dtype of the first floating-point tensor in the weights, here or on the hub; None where there are none.

    The hub is asked for the header of one file, once for each commit, and only where config.json states no dtype.
    """
    here = first_float_dtype(reference.folder)
    if here is not None or reference.is_local or reference.states_dtype:
        return here
    key = key_of(reference.location, reference.revision)
    known = read_document(_FOLDER, key)
    if isinstance(known, dict) and "dtype" in known:
        return known["dtype"] if known["dtype"] in FLOATS.values() else None
    try:
        found = _on_hub(reference.location, reference.revision)
    except Exception:  # noqa: BLE001 - whatever the hub says, the config is there
        return None
    write_document(_FOLDER, key, {"dtype": found})
    return found


def index_bytes(folder: Path) -> int | None:
    """What all weights take by the index beside config.json, in bytes; None without one."""
    try:
        document = json.loads((folder / _INDEX).read_bytes())
        total = document["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return int(total) if isinstance(total, int | float) and total > 0 else None


def _on_hub(model: str, revision: str | None) -> str | None:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    api = HfApi()
    try:
        metadata = api.parse_safetensors_file_metadata(model, _SINGLE, revision=revision, timeout=_TIMEOUT_SECONDS)
    except EntryNotFoundError:
        try:
            index = json.loads(Path(hf_hub_download(model, _INDEX, revision=revision)).read_bytes())
        except EntryNotFoundError:
            return None
        first = min(index["weight_map"].values())
        metadata = api.parse_safetensors_file_metadata(model, first, revision=revision, timeout=_TIMEOUT_SECONDS)
    return next((FLOATS[tensor.dtype] for tensor in metadata.tensors.values() if tensor.dtype in FLOATS), None)
