"""Reads map.json strictly: every message says where in the file something is wrong, and what was expected there."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from devmap_cli.devices.device import DEVICES_HINT, Device, DeviceError
from devmap_cli.errors import RequestError, SurroundingsError
from devmap_cli.mapfile import (
    FORMAT,
    MapDevice,
    MapFile,
    MapModel,
    MapTransfer,
    MapWorkload,
    check_attention,
    check_kv_dtype,
)
from devmap_cli.model.dtypes import DTYPE_HINT, is_floating
from devmap_cli.model.kv_dtypes import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_MAP_BYTES = 16 << 20
"""A map of a model with 100,000 modules takes a few MiB; anything larger is some other file."""
_FORMAT = re.compile(r"devmap\.map/(?P<version>\d+)")
_PLAN_HINT = "write a map with: devmap plan MODEL -o map.json"
_MAX_NUMBER = 2**63 - 1


def read_map(path: str | Path) -> MapFile:
    """Read a map of format devmap.map/1, or a bare `{module: device}` file.

    Args:
        path: a file, or "-" for standard input.

    Raises:
        RequestError: it is no such map; the message says where and why.
        SurroundingsError: the file is there and cannot be read.
    """
    source = _name(path)
    document = _parse_json(_decode(_read_bytes(path), source), source)
    if not isinstance(document, dict):
        raise RequestError(f"{source} holds {_kind(document)}, not a map", _PLAN_HINT)
    if "format" not in document and "device_map" not in document:
        return MapFile(_device_map(document, source))
    _check_format(document.get("format"), source)
    return _map_file(_Field(document, source))


def _name(path: str | Path) -> str:
    return "standard input" if str(path) == "-" else str(path)


def _read_bytes(path: str | Path) -> bytes:
    if str(path) == "-":
        return sys.stdin.buffer.read(MAX_MAP_BYTES + 1)
    if not str(path):
        raise RequestError("the name of the map is empty", _PLAN_HINT)
    try:
        with Path(path).open("rb") as stream:
            return stream.read(MAX_MAP_BYTES + 1)
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist", _PLAN_HINT) from None
    except (IsADirectoryError, NotADirectoryError):
        inside = Path(path) / "map.json"
        hint = f"did you mean {inside}?" if inside.is_file() else _PLAN_HINT
        raise RequestError(f"{path} is not a file", hint) from None
    except PermissionError:
        raise SurroundingsError(f"{path} may not be read", f"chmod +r '{path}'") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot read {str(path)!r}: {error}", _PLAN_HINT) from None


def _decode(raw: bytes, source: str) -> str:
    if len(raw) > MAX_MAP_BYTES:
        raise RequestError(f"{source} is larger than {MAX_MAP_BYTES >> 20} MiB, so it is no map", _PLAN_HINT)
    try:
        # Windows PowerShell's `>` writes UTF-16, editors there a byte order mark.
        text = raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError:
        raise RequestError(f"{source} is not a text file, so it is no map", _PLAN_HINT) from None
    if not text.strip():
        hint = "the command before the pipe wrote no map" if source == _name("-") else _PLAN_HINT
        raise RequestError(f"{source} is empty", hint)
    return text


def _parse_json(text: str, source: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise RequestError(f"{source} has the key {twice!r} twice in one object", "keep one of them")
        return found

    def no_number(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_number)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RequestError(f"{source} is not JSON: {where}: {error.msg}", _PLAN_HINT) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{source} is not JSON: {error}", _PLAN_HINT) from None


def _check_format(found: object, source: str) -> None:
    if found == FORMAT:
        return
    match = _FORMAT.fullmatch(found) if isinstance(found, str) else None
    if match is None:
        raise RequestError(f"{source} has the unknown format {found!r}; maps have {FORMAT!r}", _PLAN_HINT)
    if int(match["version"]) > 1:
        raise RequestError(
            f"{source} has format {found}, written by a newer devmap", "pip install --upgrade devmap-cli"
        )
    raise RequestError(f"{source} has format {found}, which this devmap no longer reads", _PLAN_HINT)


def _device_map(found: Mapping[str, Any], source: str) -> dict[str, Device]:
    if not found:
        raise RequestError(f"{source}: device_map is empty", _PLAN_HINT)
    for module in found:
        if not module.isprintable():
            raise RequestError(f"{source}: {module!r} is no module name", "use a name that devmap inspect shows")
    return {module: _device(value, f"{source}: {module!r}") for module, value in found.items()}


def _device(value: object, where: str) -> Device:
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise RequestError(f"{where}: {_kind(value)} is no device", DEVICES_HINT)
    try:
        return Device.parse(value)
    except DeviceError as error:
        raise RequestError(f"{where}: {error}", DEVICES_HINT) from None


def _kind(value: object) -> str:
    """How JSON calls the value, with an article."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    for kind, name in (
        (dict, "an object"),
        (list, "an array"),
        (str, "a string"),
        (float, "a decimal number"),
    ):
        if isinstance(value, kind):
            return name
    return "a number"


@dataclass(frozen=True, slots=True)
class _Field:
    """A value of the document, with the words that lead to it."""

    value: Any
    where: str

    def __getitem__(self, key: str) -> _Field:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if key not in self.value:
            raise RequestError(f"{self.where}: {key!r} is missing", _PLAN_HINT)
        return _Field(self.value[key], f"{self.where}: {key!r}")

    def items(self) -> list[_Field]:
        if not isinstance(self.value, list):
            raise self.wrong("an array")
        return [_Field(value, f"{self.where}[{index}]") for index, value in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value or not self.value.isprintable():
            raise self.wrong("a printable text")
        return self.value

    def whole(self, minimum: int = 0) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < minimum:
            raise self.wrong(f"a whole number from {minimum} up")
        if self.value > _MAX_NUMBER:
            raise RequestError(f"{self.where} is more than anything has", _PLAN_HINT)
        return self.value

    def truth(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def device(self) -> Device:
        return _device(self.value, self.where)

    def wrong(self, wanted: str) -> RequestError:
        found = json.dumps(self.value) if isinstance(self.value, (str, int, float)) else _kind(self.value)
        return RequestError(f"{self.where} is {found}, not {wanted}", _PLAN_HINT)


def _map_file(root: _Field) -> MapFile:
    device_map, versions = root["device_map"], root["versions"]
    for item in (device_map, versions):
        if not isinstance(item.value, dict):
            raise item.wrong("an object")
    return MapFile(
        device_map=_device_map(device_map.value, root.where),
        model=_map_model(root["model"]),
        strategy=root["strategy"].text(),
        workload=_map_workload(root["workload"]),
        devices=tuple(_map_device(item) for item in root["devices"].items()),
        transfers=tuple(
            MapTransfer(item["from"].device(), item["to"].device(), item["bytes_per_token"].whole())
            for item in root["transfers"].items()
        ),
        versions={name: versions[name].text() for name in versions.value},
        weights_only="weights_only" in root.value and root["weights_only"].truth(),
    )


def _map_model(found: _Field) -> MapModel:
    revision, quantization = found["revision"], found["quantization"]
    dtype = found["dtype"]
    if not is_floating(dtype.text()):
        raise RequestError(f"{dtype.where} is {dtype.value!r}, which is no floating-point dtype", DTYPE_HINT)
    if not isinstance(quantization.value, (dict, type(None))):
        raise quantization.wrong("an object or null")
    return MapModel(
        id=found["id"].text(),
        revision=None if revision.value is None else revision.text(),
        class_name=found["class"].text(),
        dtype=dtype.text(),
        quantization=quantization.value,
    )


def _map_workload(found: _Field) -> MapWorkload:
    attention = found["attention"]
    check_attention(attention.text(), attention.where)
    kv_dtype = found["kv_dtype"] if "kv_dtype" in found.value else _Field(AUTO, found.where)
    check_kv_dtype(kv_dtype.text(), kv_dtype.where)
    return MapWorkload(
        batch_size=found["batch_size"].whole(1),
        prompt_tokens=found["prompt_tokens"].whole(1),
        max_new_tokens=found["max_new_tokens"].whole(1),
        images=tuple(_image(size) for size in found["images"].items()),
        attention=attention.text(),
        videos=tuple(_video(size) for size in found["videos"].items()) if "videos" in found.value else (),
        kv_dtype=kv_dtype.text(),
    )


def _image(found: _Field) -> tuple[int, int]:
    sides = found.items()
    if len(sides) != 2:
        raise found.wrong("a height and a width")
    return sides[0].whole(1), sides[1].whole(1)


def _video(found: _Field) -> tuple[int, int, int]:
    sizes = found.items()
    if len(sizes) != 3:
        raise found.wrong("a height, a width and a number of frames")
    return sizes[0].whole(1), sizes[1].whole(1), sizes[2].whole(1)


def _map_device(found: _Field) -> MapDevice:
    parts = ("budget_bytes", "weights_bytes", "kv_cache_bytes", "activation_bytes", "overhead_bytes")
    device, sizes = found["device"].device(), {part: found[part].whole() for part in parts}
    item = MapDevice(device, **sizes, card=found["card"].text() if "card" in found.value else None)
    if found["peak_bytes"].whole() != item.peak_bytes:
        raise found["peak_bytes"].wrong(f"the sum of its parts, {item.peak_bytes}")
    return item
