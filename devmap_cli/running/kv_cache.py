"""Whether what quantizes a KV cache is here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from devmap_cli.errors import SurroundingsError
from devmap_cli.model.kv_dtypes import QUANTIZED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from devmap_cli.devices.device import Device


def check_kv_backend(kv_dtype: str, devices: Iterable[Device]) -> None:
    """See that a cache in `kv_dtype` can be made on `devices` of this machine.

    Raises:
        SurroundingsError: a package is missing, or the compiler that one of them runs when it is first used on a GPU.
    """
    package = QUANTIZED[kv_dtype].package if kv_dtype in QUANTIZED else None
    if package is None:
        return
    if not _is_here(package):
        raise SurroundingsError(
            f"a KV cache in {kv_dtype} needs the package {package}, which is not here or too old",
            f"pip install --upgrade {package}",
        )
    if package == "optimum-quanto" and any(device.kind == "cuda" for device in devices) and not _has_nvcc():
        raise SurroundingsError(
            f"a KV cache in {kv_dtype} needs CUDA's nvcc, with which optimum-quanto compiles its kernels",
            "install the CUDA toolkit and set CUDA_HOME, or --kv-dtype fp8",
        )


def _is_here(package: str) -> bool:
    """By the conditions of `HQQQuantizedLayer` and `QuantoQuantizedLayer` of transformers/cache_utils.py."""
    from transformers.utils.import_utils import is_hqq_available, is_optimum_quanto_available, is_quanto_greater

    if package == "hqq":
        return bool(is_hqq_available())
    return bool(is_optimum_quanto_available() and is_quanto_greater("0.2.5", accept_dev=True))


def _has_nvcc() -> bool:
    """Whether torch finds a toolkit of the kind that it was built with."""
    import torch
    from torch.utils import cpp_extension

    return bool(cpp_extension.ROCM_HOME if torch.version.hip else cpp_extension.CUDA_HOME)
