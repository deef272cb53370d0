"""KV caches that are kept quantized, as transformers' own layers keep them, without the packages that quantize.

The layers here do what those packages do, operator by operator, so that a cache takes the memory of the real one, and
so does making it: the same numbers come out where numbers are known. Others of transformers' layers stand for the real
ones while `quantized_layers` lasts.

Sources: optimum-quanto 0.2.7 (tensor/grouped.py, tensor/optimizers/max_optimizer.py, tensor/packed.py, tensor/qbits.py,
library/quantize.py, library/extensions/cuda/unpack.cu) and hqq 0.2.8 (core/quantize.py, core/optimize.py,
core/bitpack.py), each as `QuantoQuantizedLayer` and `HQQQuantizedLayer` of transformers/cache_utils.py call it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import cache_utils
from transformers.cache_utils import Fp8QuantizedLayer, QuantizedLayer

from devmap_cli.simulation.tensor import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from typing import Any

_HQQ_ROUNDS = 20
_HQQ_UNKNOWN_ROUNDS = 2
"""From the second on, each takes the memory of the one before; how many there are depends on the numbers."""
_HQQ_NORM, _HQQ_BETA = 0.7, 10.0
_HQQ_LEAST_RANGE, _HQQ_LARGEST_SCALE = 1e-4, 2e4


class Grouped(NamedTuple):
    """Quantized numbers of a tensor of `shape`, with a scale and an offset for each group of them."""

    numbers: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    shape: torch.Size


class GroupedLayer(QuantizedLayer):
    """A layer with a scale for each group of numbers, and its last tokens, up to `residual_length`, as they are.

    Whenever so many have come, all tokens are dequantized and quantized anew. A rehearsal has no step of its own for
    that: `requantizes` lets its last one need the memory for it too.
    """

    keys: torch.Tensor
    """Those of the last tokens; none before the first ones came."""
    requantizes = False

    def _stored(self, shape: torch.Size) -> Grouped:
        """What the quantized form of a tensor of `shape` takes."""
        raise NotImplementedError

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers' own; where it `requantizes`, tokens to be quantized later are so in passing."""
        if not self.requantizes:
            return super().update(key_states, value_states, *args, **kwargs)
        num_plain = self._num_plain() + key_states.shape[-2]
        num_plain = 0 if num_plain >= self.residual_length else num_plain
        residual_length, self.residual_length = self.residual_length, 0
        returned = super().update(key_states, value_states, *args, **kwargs)
        self.residual_length = residual_length
        self._hold(self.cumulative_length - num_plain, num_plain)
        return returned

    def grow(self, num_tokens: int) -> None:
        """Hold `num_tokens` more, as after as many steps."""
        num_plain = self._num_plain() + num_tokens
        self.requantizes = self.requantizes or num_plain + 1 >= self.residual_length
        num_plain %= self.residual_length
        self.cumulative_length += num_tokens
        self._hold(self.cumulative_length - num_plain, num_plain)

    def _num_plain(self) -> int:
        return self.keys.shape[-2] if self.keys.dim() == 4 else 0

    def _hold(self, num_quantized: int, num_plain: int) -> None:
        for name in ("keys", "values"):
            batch, heads, num_before, size = getattr(self, f"_quantized_{name}").shape
            if num_before != num_quantized:
                setattr(self, f"_quantized_{name}", self._stored(torch.Size((batch, heads, num_quantized, size))))
            shape = (batch, heads, num_plain, size) if num_plain else (0,)
            setattr(self, name, torch.empty(shape, dtype=self.keys.dtype, device=self.device))

    def _counted(self) -> AbstractContextManager[None]:
        """What a rehearsal does in passing is left out of what it counts as a step's work."""
        if self.requantizes and isinstance(self.keys, DeviceTensor):
            return self.keys.allocation.device.machine.uncounted()
        return nullcontext()

    def _in_groups(self, tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        """`tensor` in `shape`; in passing without what is left over, as tokens come to be quantized by the 128."""
        num_elements = tensor.numel() // tensor.shape[0]
        if num_elements % self.q_group_size:
            if not self.requantizes:
                raise ValueError(f"Group size ({self.q_group_size}) must be a divisor of ({num_elements})")
            tensor = tensor.view(-1)[: tensor.numel() // self.q_group_size * self.q_group_size]
        return tensor.reshape(shape)


class QuantoLayer(GroupedLayer):
    """Two or four bits, by optimum-quanto: groups in the order of memory, scale and shift in the dtype of the cache."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Grouped:  # type: ignore[override]  # as transformers' own
        assert axis == 0
        with self._counted():
            base = self._in_groups(tensor, -1, self.q_group_size)
            least, most = base.amin(dim=1, keepdim=True), base.amax(dim=1, keepdim=True)
            scale, shift = (most - least) / (2**self.nbits - 1), -least
            del least, most
            rounded = torch.round((base + shift) / scale)
            numbers = torch.clamp(rounded, min=0, max=2**self.nbits - 1).to(torch.uint8)
            del rounded
            return Grouped(_packed(numbers, self.nbits), scale, shift, tensor.shape)

    def _dequantize(self, quantized: Grouped) -> torch.Tensor:
        numbers = _unpacked(quantized.numbers, self.nbits)[: quantized.scale.shape[0]]
        dense = quantized.scale * numbers
        dense.sub_(quantized.offset)
        return dense.reshape(quantized.shape)

    def _stored(self, shape: torch.Size) -> Grouped:
        num_groups = shape.numel() // self.q_group_size
        num_rows = -(-num_groups * self.nbits // 8)
        numbers = torch.empty((num_rows, self.q_group_size), dtype=torch.uint8, device=self.device)
        scale, shift = (torch.empty((num_groups, 1), dtype=self.keys.dtype, device=self.device) for _ in range(2))
        return Grouped(numbers, scale, shift, shape)


def _packed(numbers: torch.Tensor, nbits: int) -> torch.Tensor:
    """Several of the rows in each byte: `pack_weights` of tensor/packed.py."""
    first, *others = numbers.split(-(-numbers.shape[0] * nbits // 8))
    packed: torch.Tensor = first.clone()
    for place, part in enumerate(others, start=1):
        packed[: part.shape[0]].bitwise_or_(part << place * nbits)
    return packed


def _unpacked(packed: torch.Tensor, nbits: int) -> torch.Tensor:
    """One byte for each number, as unpack.cu makes them: in one piece, without others on the way."""
    shifts = torch.arange(0, 8, nbits, dtype=torch.uint8, device=packed.device)
    unpacked = torch.bitwise_right_shift(packed, shifts[:, None, None])
    unpacked.bitwise_and_(2**nbits - 1)
    return unpacked.reshape(-1, packed.shape[1])


class HqqLayer(GroupedLayer):
    """Eight bits, by hqq: a byte for each number, groups across memory, offsets improved in float16 as on a GPU."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Grouped:  # type: ignore[override]  # as transformers' own
        assert axis == 0
        with self._counted():
            wide = self._in_groups(tensor, self.q_group_size, -1).float()
            least, most = wide.amin(dim=0, keepdim=True), wide.amax(dim=0, keepdim=True)
            span = most - least
            scale = (2**self.nbits - 1) / span
            scale = torch.where(span.abs() <= _HQQ_LEAST_RANGE, torch.full_like(scale, 1.0), scale)
            scale = scale.clamp(max=_HQQ_LARGEST_SCALE)
            zero = -least * scale
            numbers, scale, zero = self._improved(wide, scale, zero)
            del wide, least, most, span
            _empty_caches(tensor)
            scale = 1.0 / scale
            numbers = numbers.to(torch.uint8)
            _empty_caches(tensor)
            return Grouped(numbers, scale.to(self.keys.dtype), zero.to(self.keys.dtype), tensor.shape)

    def _improved(
        self, wide: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`optimize_weights_proximal_legacy` of core/optimize.py."""
        half, scale, zero = wide.to(torch.float16), scale.to(torch.float16), zero.to(torch.float16)
        least_error = torch.tensor(torch.inf, dtype=torch.float32, device=wide.device)
        is_known = not (isinstance(wide, DeviceTensor) and wide.numbers.is_meta)
        for _ in range(_HQQ_ROUNDS if is_known else _HQQ_UNKNOWN_ROUNDS):
            restored, numbers, zero = self._round(half, scale, zero)
            error = torch.abs(half - restored).mean().float()
            if is_known and not error < least_error:
                break
            least_error = error
        del half, restored, numbers
        _empty_caches(wide)
        return torch.round(wide * scale + zero).clamp_(0, 2**self.nbits - 1), scale, zero

    def _round(
        self, half: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers = torch.round(half * scale + zero).clamp_(0, 2**self.nbits - 1)
        restored = (numbers - zero) / scale
        error = _shrunk(half - restored)
        return restored, numbers, torch.mean(numbers - (half - error) * scale, dim=0, keepdim=True)

    def _dequantize(self, quantized: Grouped) -> torch.Tensor:
        numbers = quantized.numbers.to(self.keys.dtype)
        return ((numbers - quantized.offset) * quantized.scale).reshape(quantized.shape)

    def _stored(self, shape: torch.Size) -> Grouped:
        num_groups = shape.numel() // self.q_group_size
        numbers = torch.empty((self.q_group_size, num_groups), dtype=torch.uint8, device=self.device)
        scale, zero = (torch.empty((1, num_groups), dtype=self.keys.dtype, device=self.device) for _ in range(2))
        return Grouped(numbers, scale, zero, shape)


def _shrunk(error: torch.Tensor) -> torch.Tensor:
    """`shrink_lp_op` of core/optimize.py."""
    shrunk = torch.abs(error)
    shrunk.sub_((1.0 / _HQQ_BETA) * shrunk.pow(_HQQ_NORM - 1)).clamp_min_(0.0)
    shrunk.mul_(torch.sign(error))
    return shrunk


def _empty_caches(tensor: torch.Tensor) -> None:
    """`torch.cuda.empty_cache()`, which hqq calls again and again."""
    if isinstance(tensor, DeviceTensor):
        tensor.allocation.device.machine.empty_caches()


class Float8Layer(Fp8QuantizedLayer):
    """Transformers' own layer of 8-bit floats, which needs no package: one scale for all tokens."""

    def grow(self, num_tokens: int) -> None:
        """Hold `num_tokens` more, as after as many steps."""
        for name in ("_quantized_keys", "_quantized_values"):
            quantized, scale = getattr(self, name)
            shape = (*quantized.shape[:-2], quantized.shape[-2] + num_tokens, quantized.shape[-1])
            longer = torch.empty(shape, dtype=quantized.dtype, device=quantized.device)
            setattr(self, name, (longer, scale))
        self.cumulative_length += num_tokens


_STANDING_IN = {
    "QuantoQuantizedLayer": QuantoLayer,
    "HQQQuantizedLayer": HqqLayer,
    "Fp8QuantizedLayer": Float8Layer,
}


@contextmanager
def quantized_layers() -> Iterator[None]:
    """Let transformers' quantized caches have the layers of this module."""
    own = {name: getattr(cache_utils, name) for name in _STANDING_IN}
    for name, layer in _STANDING_IN.items():
        setattr(cache_utils, name, layer)
    try:
        yield
    finally:
        for name, layer in own.items():
            setattr(cache_utils, name, layer)
