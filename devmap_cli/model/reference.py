"""What MODEL on the command line means: a folder with config.json, or a hub id."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devmap_cli.errors import DevmapError, RequestError, SurroundingsError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
CONFIG_NAME = "config.json"


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
    def has_remote_code(self) -> bool:
        """Whether config.json names classes in the model's own repository."""
        return bool(self.config.get("auto_map"))


def resolve(model: str, revision: str | None = None) -> ModelReference:
    """Find MODEL and read its config.json; a hub id's is downloaded, or taken from the hub's cache.

    Raises:
        RequestError: no such folder or hub model, no config.json in it, or one that is no JSON object.
        SurroundingsError: the hub cannot be reached, or refuses.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = path.absolute()  # a map that names it must hold from any folder
        return _read(str(path), revision, path / CONFIG_NAME)
    if path.exists():
        raise RequestError(
            f"{model} is a file, and MODEL is a folder with config.json or a hub id",
            f"give its folder: {path.parent}" if path.name == CONFIG_NAME else None,
        )
    if not _HUB_ID.fullmatch(model) or model.count("/") > 1:
        raise RequestError(f"no folder {model!r}, and no hub id either", "MODEL is a folder, or like Qwen/Qwen2.5-7B")
    config_path = _download(model, revision)
    return _read(model, _commit(config_path) or revision, config_path)


def _read(location: str, revision: str | None, config_path: Path) -> ModelReference:
    try:
        text = config_path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(
            f"{config_path.parent} has no config.json", "MODEL is a folder with config.json, or a hub id"
        ) from None
    except UnicodeDecodeError:
        raise RequestError(f"{config_path} is no text file", "download it again") from None
    except OSError as error:
        raise SurroundingsError(f"cannot read {config_path}: {error.strerror}") from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{config_path} is no JSON: {error.msg} at line {error.lineno} column {error.colno}",
            "download it again",
        ) from None
    except RecursionError:
        raise RequestError(
            f"{config_path} is no JSON that can be read: nested too deeply", "download it again"
        ) from None
    if not isinstance(config, dict):
        raise RequestError(f"{config_path} is no JSON object", "download it again")
    _check_names(config, config_path)
    return ModelReference(location, revision, config_path.parent, config, text)


def _check_names(config: dict[str, Any], config_path: Path) -> None:
    """Refuse names of a kind that transformers would stumble over."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    hint = "compare it with the model's page on the hub"
    if not isinstance(model_type, str | None):
        raise RequestError(f"model_type in {config_path} is no text", hint)
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise RequestError(f"architectures in {config_path} is no list of class names", hint)


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
