"""Infers the shapes of results with PyTorch's meta kernels, once for each combination of arguments.

A model runs the same operators on the same shapes in each of its equal layers, and the inference depends on nothing
else, so its result is kept: what an operator gave for these shapes, strides, types and scalars it gives again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Any

_MAX_KEPT = 50_000

_recipes: dict[Hashable, tuple[Any, ...]] = {}
"""How to make each result: ("argument", index), ("view", index, size, stride, offset), ("new", size, stride, dtype),
("constant", value), or ("list", type, recipes)."""


class _NotReproducibleError(Exception):
    """A result that a recipe cannot describe."""


def infer(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` for tensors on the meta device, and scalar tensors on the CPU."""
    tensors: list[torch.Tensor] = []
    key = _key(func, args, kwargs, tensors)
    recipe = _recipes.get(key)
    if recipe is not None:
        return _make(recipe, tensors)
    try:
        results = func(*args, **kwargs)
    except NotImplementedError as error:
        raise NotImplementedError(f"PyTorch does not infer what {func} results in") from error
    if _key(func, args, kwargs, []) != key:  # it gave an argument another shape, as `transpose_` does
        return results
    try:
        recipe = _recipe(results, tensors)
    except _NotReproducibleError:
        return results
    if len(_recipes) >= _MAX_KEPT:
        _recipes.clear()
    _recipes[key] = recipe
    return results


def _key(func: Any, args: list[Any], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Hashable:
    return func, _describe(args, tensors), *((name, _describe(value, tensors)) for name, value in kwargs.items())


def _describe(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """What the shape of the results can depend on, the type of a scalar with it: 2 and 2.0 are equal keys."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.is_meta
    if isinstance(value, (list, tuple)):
        return tuple([_describe(item, tensors) for item in value])
    return type(value), value


def _recipe(result: Any, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    if isinstance(result, torch.Tensor):
        return _tensor_recipe(result, tensors)
    if isinstance(result, (list, tuple)):
        return "list", type(result), [_recipe(item, tensors) for item in result]
    return "constant", result


def _tensor_recipe(result: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    storage = result.untyped_storage()
    for index, tensor in enumerate(tensors):
        if result is tensor:
            return "argument", index
        if storage._cdata == tensor.untyped_storage()._cdata:
            if result.dtype != tensor.dtype:
                raise _NotReproducibleError
            return "view", index, result.shape, result.stride(), result.storage_offset()
    remade = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    if result.storage_offset() or storage.nbytes() != remade.untyped_storage().nbytes():
        raise _NotReproducibleError
    return "new", result.shape, result.stride(), result.dtype


def _make(recipe: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
    kind = recipe[0]
    if kind == "new":
        return torch.empty_strided(recipe[1], recipe[2], dtype=recipe[3], device="meta")
    if kind == "view":
        return tensors[recipe[1]].as_strided(recipe[2], recipe[3], recipe[4])
    if kind == "argument":
        return tensors[recipe[1]]
    if kind == "list":
        return recipe[1](_make(item, tensors) for item in recipe[2])
    return recipe[1]
