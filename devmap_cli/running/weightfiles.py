"""Whether a folder's weights are all there and whole, before anything is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from devmap_cli.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


def check_weight_files(folder: Path) -> None:
    """Look at every safetensors file that the folder's model consists of; only headers are read.

    Raises:
        RequestError: weights are missing, are only there as pickles, or a file is damaged.
    """
    if (folder / _SINGLE).is_file():
        shards = [folder / _SINGLE]
    elif (folder / _INDEX).is_file():
        shards = _shards(folder)
    else:
        raise _no_weights(folder)
    missing = [path for path in shards if not path.is_file()]
    if missing:
        raise RequestError(
            f"{len(missing)} of {len(shards)} weight files are missing, the first is {missing[0]}",
            "download the missing files again",
        )
    for path in shards:
        _check_shard(path)


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{index} is no index of weight files", "download it again") from error


def _check_shard(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise RequestError(f"{path} is damaged or cut off ({error})", "download that file again") from error


def _no_weights(folder: Path) -> RequestError:
    if any(path for pattern in _PICKLES for path in folder.glob(pattern)):
        return RequestError(
            f"{folder} has its weights only as pickle files, which can run any code and are never loaded",
            "convert them to safetensors: load the model elsewhere and save_pretrained() it",
        )
    return RequestError(
        f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}",
        "download them into that folder, or give a hub id",
    )
