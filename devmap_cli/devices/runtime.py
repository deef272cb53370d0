"""What a process takes of a device before and beside its tensors, as far as it is published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MIB = 1 << 20

CUDA_RUNTIME_BYTES = 640 * _MIB
"""CUDA: the driver's context, the kernels loaded into it, and the handles of cuBLAS and cuDNN.

666,632,192 bytes (635.8 MiB) were measured after the first tensor with all of PyTorch's kernels loaded, and 287,047,680
with CUDA_MODULE_LOADING=LAZY, PyTorch's default since 1.13 (pull request 86509 of pytorch/pytorch); "around 400MB" is
what its developers name for a lazy context (issue 109888). Lazy loading goes from the second figure towards the first
as kernels come into use, so the first is taken. The workspace of cuBLAS is not in it: that comes from the allocator.
"""

XPU_RUNTIME_BYTES = CUDA_RUNTIME_BYTES
"""Intel GPUs: no figure is published for Level Zero's context with oneDNN's kernels; CUDA's is taken."""

NPU_RUNTIME_BYTES = 512 * _MIB
"""Ascend: CANN's context for a device, measured at 199 MB on a 910B2 (issue 2422 of hw-native-sys/simpler), and 98 MiB
of tiling buffers of the operator library (issue 14300 of vllm-project/vllm-ascend), the rest left for kernels. What
npu-smi shows of an idle device, some 3 GB, is the firmware's and no process's.
"""

MPS_RUNTIME_BYTES = 256 * _MIB
"""Apple: no figure is published for what MPS and MPSGraph allocate themselves, which torch.mps.driver_allocated_memory
counts beside the allocator's pools. Metal has no context with all kernels in it, so less than CUDA's is taken.
"""


@dataclass(frozen=True, slots=True)
class Runtime:
    """What lies on a kind of device beside tensors.

    Args:
        num_bytes: of a device that is large enough for all of it.
        name: what it is, in few words.
        source: what the figure stands on.
    """

    num_bytes: int
    name: str
    source: str


RUNTIMES: Final = {
    "cuda": Runtime(
        CUDA_RUNTIME_BYTES, "CUDA's context and kernels", "635.8 MiB were measured with all of PyTorch's kernels loaded"
    ),
    "xpu": Runtime(XPU_RUNTIME_BYTES, "Level Zero's context and kernels", "taken from CUDA, as no figure is published"),
    "npu": Runtime(
        NPU_RUNTIME_BYTES, "CANN's context and buffers", "199 MB and 98 MiB were measured, and kernels come on top"
    ),
    "mps": Runtime(MPS_RUNTIME_BYTES, "Metal's own buffers", "less than CUDA takes, as no figure is published"),
}
"""By kind of device; simulated ones, cpu and disk have no driver."""

_LARGEST_SHARE = 8
"""Of a budget so small that it is no whole device, one part in so many counts for the runtime at most."""


def runtime_overhead_bytes(kind: str, budget_bytes: int | None = None) -> int:
    """An estimate, on the high side, of what a process takes of a device of `kind` outside PyTorch's allocator.

    At most an eighth of `budget_bytes`: kernels are loaded as they come into use, and on a small device, with its
    small models, not all of them do. An eighth of 2 GiB is what a CUDA context takes with none but the first loaded.
    """
    runtime = RUNTIMES.get(kind)
    if runtime is None:
        return 0
    return runtime.num_bytes if budget_bytes is None else min(runtime.num_bytes, budget_bytes // _LARGEST_SHARE)


def is_whole_runtime(kind: str, budget_bytes: int) -> bool:
    """Whether a budget is so large that all of the runtime counts, rather than an eighth of the budget."""
    return runtime_overhead_bytes(kind, budget_bytes) == runtime_overhead_bytes(kind)
