"""Numbers for rehearsals: floats are shapes, small integers and booleans are real.

What a model computes from its weights is unknown without them, and is kept as a shape on the meta device. What it
computes from shapes, positions, image grids and token ids is known, and is computed: masks, indices and
stopping criteria run as they are. Where code asks for an unknown number, it gets a plausible one, and the
assumption is noted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.inference import infer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from devmap_cli.simulation.operators import Call

aten = torch.ops.aten

MAX_KNOWN_ELEMENTS = 1 << 20
"""Tensors with more elements are shapes even if their numbers could be computed."""
MAX_COPIED_BOOLEANS = 1 << 26
"""Copies of masks are known up to this many elements, which an expanded one soon has."""
_SURELY_SMALL = 1 << 10
"""Tensors of up to this many elements broadcast to no more than MAX_KNOWN_ELEMENTS."""


class Shapes:
    """Computes what is known and the shape of what is not; `assume` is told of each plausible number."""

    def __init__(self, assume: Callable[[str], None]) -> None:
        self._assume = assume

    def empty(
        self,
        size: Sequence[int],
        dtype: torch.dtype | None,
        *,
        stride: Sequence[int] | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        """A shape for floats; zeros for integers, so that a rehearsal comes out the same every time."""
        dtype = dtype or torch.get_default_dtype()
        if stride is not None:
            numbers = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        else:
            layout = memory_format or torch.contiguous_format
            numbers = torch.empty(size, dtype=dtype, device="meta", memory_format=layout)
        if dtype.is_floating_point or dtype.is_complex or numbers.numel() > MAX_KNOWN_ELEMENTS:
            return numbers
        return _like(numbers, "cpu").zero_()

    def compute(self, call: Call) -> Any:
        """The result's numbers where they can be known, else its shape."""
        tensors = call.tensors
        if any([tensor.is_meta for tensor in tensors]):  # noqa: C419  # a list is faster for so few
            return self._compute_unknown(call)
        is_small = tensors and all(tensor.numel() <= _SURELY_SMALL for tensor in tensors)
        if is_small or _is_small(call) or _is_copy_of_mask(call):
            return call.func(*call.args, **call.kwargs)
        return self._compute_unknown(call)

    def repeats(self, func: Any) -> bool:
        """True but for operators that read unknown numbers, or note an assumption."""
        return func not in _RULES

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Known if the source is, and either the target was or nothing of the target is left."""
        if source.is_meta:
            return target if target.is_meta else _like(target, "meta")
        if target.is_meta and _may_become_known(target):
            target = _like(target, "cpu")
        return target if target.is_meta else target.copy_(source)

    def attend(self, call: Call) -> None:
        """Its numbers are unknown."""

    def reveal(self, numbers: torch.Tensor) -> torch.Tensor:
        """Zeros for unknown numbers, true for unknown booleans."""
        if not numbers.is_meta:
            return numbers
        is_bool = numbers.dtype == torch.bool
        self._assume(f"unknown {numbers.dtype} read as {'true' if is_bool else 'zero'}".replace("torch.", ""))
        value = torch.ones((), dtype=numbers.dtype) if is_bool else torch.zeros((), dtype=numbers.dtype)
        return value.expand(numbers.shape)

    # ------------------------------------------------------------------ with unknown numbers

    def _compute_unknown(self, call: Call) -> Any:
        rule = _RULES.get(call.func)
        return self._infer(call) if rule is None else rule(self, call)

    def _infer(self, call: Call) -> Any:
        _blank_arguments(call)
        return infer(call.func, call.args, call.kwargs)

    def _read(self, call: Call) -> Any:
        args = [self.reveal(arg) if isinstance(arg, torch.Tensor) else arg for arg in call.args]
        return call.func(*args, **call.kwargs)

    def _overwrite(self, call: Call) -> Any:
        target, *values = call.args
        if not _may_become_known(target) or any(value.is_meta for value in _tensors_among(values)):
            return self._infer(call)
        call.args[0] = _like(target, "cpu")
        call.replace(target, call.args[0])
        return call.func(*call.args, **call.kwargs)

    def _index(self, call: Call) -> Any:
        call.args[1] = [position for index in call.args[1] for position in self._positions(index)]
        return self._infer(call)

    def _embedding(self, call: Call) -> Any:
        """Refuses rows that are not there as the CPU does."""
        table, rows = call.args[:2]
        if not rows.is_meta and rows.numel():
            least, most = rows.aminmax()
            if least < 0 or most >= table.shape[0]:
                raise IndexError("index out of range in self")
        return self._infer(call)

    def _masked_select(self, call: Call) -> torch.Tensor:
        return torch.empty(self._count(call.args[1]), dtype=call.args[0].dtype, device="meta")

    def _grouped_mm(self, call: Call) -> Any:
        """PyTorch infers the shape for bfloat16 only; other types run as a loop over the groups, to the same end."""
        _blank_arguments(call)
        dtype = call.args[0].dtype
        factors = [torch.empty_like(factor, dtype=torch.bfloat16) for factor in call.args[:2]]
        result = infer(call.func, [*factors, *call.args[2:]], call.kwargs)
        return result if dtype == torch.bfloat16 else torch.empty_like(result, dtype=dtype)

    def _nonzero(self, call: Call) -> torch.Tensor:
        mask = call.args[0]
        count = self._count(mask)
        if count * mask.dim() > MAX_KNOWN_ELEMENTS:
            return torch.empty((count, mask.dim()), dtype=torch.long, device="meta")
        positions: torch.Tensor = self.reveal(mask).nonzero()
        return positions

    def _positions(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The positions that a mask selects, one tensor per dimension; an index as it is."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        count = self._count(index)
        return [torch.empty(count, dtype=torch.long, device="meta") for _ in range(index.dim())]

    def _count(self, mask: torch.Tensor) -> int:
        if mask.is_meta:
            self._assume("a mask that depends on unknown numbers is all true")
            return mask.numel()
        return count_nonzero(mask)

    # ------------------------------------------------------------------ choices among unknown numbers

    def _choose_second(self, call: Call) -> Any:
        """Of (values, indices) such as topk's, the indices spread evenly."""
        values, indices = self._infer(call)
        return values, self._spread(indices, call)

    def _choose(self, call: Call) -> torch.Tensor:
        return self._spread(self._infer(call), call)

    def _spread(self, indices: torch.Tensor, call: Call) -> torch.Tensor:
        if indices.numel() > MAX_KNOWN_ELEMENTS:
            return indices
        scores = call.args[0]
        dim = call.kwargs.get("dim", _dimension(call))
        num_choices = scores.numel() if dim is None else scores.shape[dim] if scores.dim() else 1
        self._assume(f"{_name(call.func)} of {num_choices} unknown scores: spread evenly")
        chosen = torch.arange(indices.numel()) % num_choices
        return _like(indices, "cpu").copy_(chosen.reshape(indices.shape))

    def _choose_order(self, call: Call) -> Any:
        """Of (values, indices) such as sort's, the order as it was."""
        values, indices = self._infer(call)
        if indices.numel() > MAX_KNOWN_ELEMENTS:
            return values, indices
        self._assume(f"{_name(call.func)} of unknown numbers: they are in order")
        dim = call.args[0].dim() - 1 if call.args[0].dim() else 0
        order = torch.arange(indices.shape[dim] if indices.dim() else 1)
        return values, order.expand(indices.shape).contiguous()


_RULES: dict[Any, Callable[[Shapes, Call], Any]] = {
    **dict.fromkeys(
        (
            aten._local_scalar_dense.default,
            aten.equal.default,
            aten.is_nonzero.default,
            aten.bincount.default,
            aten.repeat_interleave.Tensor,
            aten._unique2.default,
            aten.unique_dim.default,
            aten.unique_consecutive.default,
        ),
        Shapes._read,
    ),
    **dict.fromkeys((aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor), Shapes._overwrite),
    **dict.fromkeys(
        (
            aten.index.Tensor,
            aten._unsafe_index.Tensor,
            aten.index_put.default,
            aten.index_put_.default,
            aten._index_put_impl_.default,
            aten._unsafe_index_put.default,
        ),
        Shapes._index,
    ),
    aten.embedding.default: Shapes._embedding,
    aten.nonzero.default: Shapes._nonzero,
    aten.masked_select.default: Shapes._masked_select,
    aten._grouped_mm.default: Shapes._grouped_mm,
    **dict.fromkeys((aten.topk.default, aten.max.dim, aten.min.dim), Shapes._choose_second),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.multinomial.default), Shapes._choose),
    **dict.fromkeys((aten.sort.default, aten.sort.stable), Shapes._choose_order),
}
"""Operators whose results depend on unknown numbers in more than their values, or can be known all the same."""


def count_nonzero(mask: torch.Tensor) -> int:
    """How many elements of a known `mask` are true; a broadcast dimension is counted once and multiplied."""
    repeats = 1
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if size > 1 and stride == 0:
            mask = mask.narrow(dim, 0, 1)
            repeats *= size
    return int(mask.count_nonzero()) * repeats


def _tensors_among(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _like(numbers: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(numbers.size(), numbers.stride(), dtype=numbers.dtype, device=device)


def _may_become_known(numbers: torch.Tensor) -> bool:
    """Whether writing all of `numbers` leaves nothing unknown in the memory they are in."""
    whole = numbers.untyped_storage().nbytes() == numbers.numel() * numbers.element_size()
    return whole and numbers.numel() <= MAX_KNOWN_ELEMENTS


def _blank_arguments(call: Call) -> None:
    nothing_known = all([tensor.is_meta for tensor in call.tensors])  # noqa: C419  # a list is faster for so few
    if nothing_known and call.kwargs.get("device") is None:
        return
    call.args = [_blank(value, call) for value in call.args]
    call.kwargs = {name: _blank(value, call) for name, value in call.kwargs.items()}


def _blank(value: Any, call: Call) -> Any:
    """The shape of a known argument; a number of the host stays, operators take it beside shapes."""
    if isinstance(value, list):
        return [_blank(item, call) for item in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, torch.Tensor) or value.is_meta or (value.dim() == 0 and not call.owns(value)):
        return value
    shape = _like(value, "meta")
    call.replace(value, shape)
    return shape


def _is_small(call: Call) -> bool:
    """Whether the results are small enough to be computed, by inferring their shapes first."""
    args = [_shape_of(value) for value in call.args]
    kwargs = {name: _shape_of(value) for name, value in call.kwargs.items()}
    try:
        results = infer(call.func, args, kwargs)
    except (NotImplementedError, RuntimeError):  # the shape depends on the numbers, or there is no inference
        return True
    found = _tensors_among(results if isinstance(results, (tuple, list)) else [results])
    return all(_num_distinct(tensor) <= MAX_KNOWN_ELEMENTS for tensor in found)


def _is_copy_of_mask(call: Call) -> bool:
    """Whether it copies a mask, which was expanded over a dimension if it is large, and tells how much is selected."""
    if call.func is not aten._to_copy.default or call.kwargs.get("dtype") not in (None, torch.bool):
        return False
    mask: torch.Tensor = call.args[0]
    return mask.dtype == torch.bool and mask.numel() <= MAX_COPIED_BOOLEANS


def _num_distinct(tensor: torch.Tensor) -> int:
    """Its elements, those that lie in one place counted once: a mask expanded over a dimension is no larger for it."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)


def _shape_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _like(value, "meta")
    if isinstance(value, list):
        return [_shape_of(item) for item in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


def _dimension(call: Call) -> int | None:
    """The dimension an operator chooses along, by its schema: topk has it third, the others second."""
    for position, argument in enumerate(call.func._schema.arguments):
        if argument.name == "dim":
            given = call.args[position] if position < len(call.args) else argument.default_value
            return None if given is None else int(given)
    return -1


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")
