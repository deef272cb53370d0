"""What MODEL on the command line means: a folder with config.json, or a hub id."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devmap_cli.errors import DevmapError, RequestError, SurroundingsError, first_line
from devmap_cli.model.dtypes import DTYPE_HINT, is_floating
from devmap_cli.model.lookups import known_file, remember

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
CONFIG_NAME = "config.json"
MAX_PARTS = 10_000
"""More layers, or experts in a layer, than any model has; a slip of the keyboard would take hours to build."""
_COUNT = re.compile(r"(?:\w*_)?(?:layers?|depth|experts)")
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_MODEL_HINT = "MODEL is a folder with config.json, or a hub id like Qwen/Qwen2.5-7B"
_HUB_PAGE_HINT = "compare it with the model's page on the hub"


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A model whose config.json has been read.

    `location` is what from_pretrained takes: the folder, or the hub id. `folder` is where config.json lies.
    """

    location: str
    revision: str | None
    folder: Path
    config: dict[str, Any]
    config_text: str

    @property
    def is_local(self) -> bool:
        """Whether MODEL was a folder."""
        return Path(self.location) == self.folder

    @property
    def states_dtype(self) -> bool:
        """Whether config.json says in which dtype the weights are, or the config of a part of it."""
        return any(name.rpartition(".")[2] in _DTYPE_FIELDS and value for name, value in fields(self.config))

    @property
    def has_remote_code(self) -> bool:
        """Whether config.json names classes in the model's own repository."""
        return bool(self.config.get("auto_map"))


def resolve(model: str, revision: str | None = None) -> ModelReference:
    """Find MODEL and read its config.json; a hub id's is downloaded, or taken from the hub's cache.

    A hub that was asked a few minutes ago is not asked again.

    Raises:
        RequestError: no such folder or hub model, no config.json in it, or one that is no JSON object.
        SurroundingsError: the hub cannot be reached, or refuses.
    """
    if not model.strip():
        raise RequestError("MODEL is empty", _MODEL_HINT)
    if not _is_text(model):
        raise RequestError(f"{model!r} is no text that a map could hold", "rename the folder")
    path = Path(model).expanduser()
    if path.is_dir():
        path = path.absolute()  # a map that names it must hold from any folder
        return _read(str(path), revision, path / CONFIG_NAME)
    if path.exists():
        raise RequestError(
            f"{model} is a file, and MODEL is a folder with config.json or a hub id",
            f"give its folder: {path.parent}" if path.name == CONFIG_NAME else _MODEL_HINT,
        )
    if not _HUB_ID.fullmatch(model) or model.count("/") > 1:
        raise RequestError(f"no folder {model!r}, and no hub id either", _MODEL_HINT)
    config_path = known_file(model, revision)
    if config_path is None:
        config_path = _download(model, revision)
        remember(model, revision, config_path)
    return _read(model, _commit(config_path) or revision, config_path)


def _is_text(name: str) -> bool:
    """Whether a name has characters alone, and no bytes that are none."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(location: str, revision: str | None, config_path: Path) -> ModelReference:
    if config_path.exists() and not config_path.is_file():  # a pipe would be waited for
        raise RequestError(f"{config_path} is no regular file", _MODEL_HINT)
    try:
        text = config_path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(f"{config_path.parent} has no config.json", _MODEL_HINT) from None
    except UnicodeDecodeError:
        raise RequestError(f"{config_path} is no text file", "download it again") from None
    except OSError as error:
        raise SurroundingsError(f"cannot read {config_path}: {error.strerror}", f"chmod +r '{config_path}'") from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{config_path} is no JSON: {error.msg} at line {error.lineno} column {error.colno}",
            "download it again",
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise RequestError(
            f"{config_path} is no JSON that can be read: {first_line(error).partition(';')[0]}", "download it again"
        ) from None
    except RecursionError:
        raise RequestError(
            f"{config_path} is no JSON that can be read: nested too deeply", "download it again"
        ) from None
    if not isinstance(config, dict):
        raise RequestError(f"{config_path} is no JSON object", "download it again")
    _check_names(config, config_path)
    for name, value in fields(config):
        _check_field(name, value, config_path)
    return ModelReference(location, revision, config_path.parent, config, text)


def _check_names(config: dict[str, Any], config_path: Path) -> None:
    """Refuse names of a kind that transformers would stumble over."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str | None):
        raise RequestError(f"model_type in {config_path} is no text", _HUB_PAGE_HINT)
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise RequestError(f"architectures in {config_path} is no list of class names", _HUB_PAGE_HINT)


def fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a config and of the configs of its parts, each with the names that lead to it."""
    for name, value in config.items():
        yield name, value
        if name.endswith("_config") and isinstance(value, dict):
            yield from ((f"{name}.{inner}", found) for inner, found in fields(value))


def _check_field(name: str, value: object, config_path: Path) -> None:
    """Refuse what no model has, and what would be found late or never told by name."""
    field = name.rpartition(".")[2]
    if isinstance(value, int) and value > MAX_PARTS and _COUNT.fullmatch(field):
        found = f"{value:,}" if value < 10**12 else "enormous"
        raise RequestError(f"{name} in {config_path} is {found}, and no model has above {MAX_PARTS:,}", _HUB_PAGE_HINT)
    if field in _DTYPE_FIELDS and not isinstance(value, dict | None) and not is_floating(value):
        raise RequestError(f"{name} in {config_path} is {value!r}, which is no floating-point dtype", DTYPE_HINT)


def _commit(config_path: Path) -> str | None:
    """The commit of a file in the hub's cache: `snapshots/COMMIT/config.json`."""
    parts = config_path.parts
    return parts[-2] if len(parts) > 2 and parts[-3] == "snapshots" else None


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from devmap_cli.model.quiet import quiet_loggers

    disable_progress_bars()
    try:
        with quiet_loggers():
            return Path(hf_hub_download(model, CONFIG_NAME, revision=revision))
    except Exception as error:
        raise hub_error(error, model, revision) from error


def hub_error(error: Exception, model: str, revision: str | None = None) -> DevmapError:
    """What went wrong with the hub, told in our words."""
    from huggingface_hub import errors as hub

    if isinstance(error, hub.GatedRepoError):
        return SurroundingsError(f"{model} is gated on the hub", "ask for access on its page, then: hf auth login")
    if isinstance(error, hub.RepositoryNotFoundError | hub.HFValidationError):
        return RequestError(
            f"no folder and no hub model {model!r}",
            "check the spelling; for a private model: hf auth login; for a folder, give its path",
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return RequestError(f"{model} has no revision {revision!r}", "leave --revision out for the newest")
    if isinstance(error, hub.RemoteEntryNotFoundError):
        return RequestError(f"{model} has no config.json on the hub", "give a Transformers model")
    if isinstance(error, hub.LocalEntryNotFoundError | hub.OfflineModeIsEnabled):
        offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
        reason = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        hint = "unset HF_HUB_OFFLINE" if offline else "check the network or HF_ENDPOINT"
        return SurroundingsError(
            f"{reason}, and {model} is not in the hub's cache", f"{hint}, or give a folder with config.json"
        )
    detail = str(error).strip().splitlines()
    return SurroundingsError(
        f"cannot get {model} from the hub: {detail[0] if detail else type(error).__name__}",
        "check the network or HF_ENDPOINT, or give a folder with config.json",
    )
