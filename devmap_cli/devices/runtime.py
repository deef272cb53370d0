"""What a process takes of a device before and beside its tensors, as far as it is published."""

from __future__ import annotations

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

_RUNTIME_BYTES = {
    "cuda": CUDA_RUNTIME_BYTES,
    "xpu": XPU_RUNTIME_BYTES,
    "npu": NPU_RUNTIME_BYTES,
    "mps": MPS_RUNTIME_BYTES,
    "sim": 0,  # simulated devices have no driver
    "cpu": 0,
    "disk": 0,
}


_LARGEST_SHARE = 8
"""Of a budget so small that it is no whole device, one part in so many counts for the runtime at most."""


def runtime_overhead_bytes(kind: str, budget_bytes: int | None = None) -> int:
    """An estimate, on the high side, of what a process takes of a device of `kind` outside PyTorch's allocator.

    At most an eighth of `budget_bytes`: kernels are loaded as they come into use, and on a small device, with its
    small models, not all of them do. An eighth of 2 GiB is what a CUDA context takes with none but the first loaded.
    """
    figure = _RUNTIME_BYTES[kind]
    return figure if budget_bytes is None else min(figure, budget_bytes // _LARGEST_SHARE)
