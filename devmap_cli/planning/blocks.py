"""A model cut into the blocks that are placed, and placed blocks folded into a device map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from devmap_cli.model.names import is_ancestor, join, parent
from devmap_cli.model.spec import ModelSpec, ModuleSpec
from devmap_cli.planning.nouns import Block, Placement

_MAIN_STACK_SHARE = 0.25
_STACK_CLASS = "ModuleList"


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is never cut further: a module, or the tensors that a cut module holds directly.

    `position` is where a forward first enters it, then its place in definition order.
    """

    fqns: tuple[str, ...]
    num_bytes: int
    position: tuple[int, int]


def blocks_of(spec: ModelSpec, kv_tokens: int, batch_size: int) -> tuple[Block, ...]:
    """Cut a model into blocks, in execution order, that cover every parameter and buffer exactly once.

    A block is a no-split module, an element of a repeated ModuleList that has no no-split modules in it, a
    leaf, or a module that holds tensors beside children. Only where such a module contains most of the model
    is it cut: then its own tensors are a block, keyed by tensor names. Modules that share weights make one
    block. Branches that no text reaches (a vision tower) stay where the definition has them.
    `transient_bytes` is left at 0.

    Args:
        spec: the model.
        kv_tokens: length at which the KV cache is counted.
        batch_size: sequences in the KV cache.
    """
    pieces = sorted(_Cutter(spec).pieces(), key=lambda piece: piece.position)
    index_of = {fqn: index for index, piece in enumerate(pieces) for fqn in piece.fqns}
    groups = _merged_by_ties(spec, index_of, len(pieces))
    kv_bytes = _kv_bytes(spec, index_of, kv_tokens, batch_size)
    streamed = _streamed_bytes(spec, index_of)
    return tuple(
        Block(
            fqns=tuple(fqn for index in group for fqn in pieces[index].fqns),
            weights_bytes=sum(pieces[index].num_bytes for index in group),
            kv_cache_bytes=sum(kv_bytes[index] for index in group),
            streamed_bytes=max(streamed[index] for index in group),
        )
        for group in groups
    )


class _Cutter:
    """One walk over a model that finds its pieces."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.bytes_below = _bytes_below(spec)
        self.holding = _holding_tensors(spec)
        self.entered = _first_entries(spec)
        self.whole = frozenset(_never_cut(spec))
        self.bytes_in_whole = self._bytes_in_whole()
        self.num_pieces = 0

    def pieces(self) -> Iterator[_Piece]:
        """All pieces in definition order."""
        return self._cut("", self.spec.root, -1)

    def _bytes_in_whole(self) -> Counter[str]:
        """Bytes of never-cut modules at or below each module."""
        below: Counter[str] = Counter()
        for fqn in self.whole:
            for name in _with_ancestors(fqn):
                below[name] += self.bytes_below[fqn]
        return below

    def _cut(self, fqn: str, module: ModuleSpec, default: int) -> Iterator[_Piece]:
        """The pieces of one module; `default` is the position for what no forward enters."""
        if fqn not in self.holding:
            return
        position = self.entered.get(fqn, default)
        children = [(join(fqn, child.name), child) for child in module.children]
        children = [(name, child) for name, child in children if name in self.holding]
        if fqn in self.whole or not children or (module.tensors and not self._is_mostly_blocks(fqn)):
            yield self._piece((fqn,), self.bytes_below[fqn], position)
            return
        if module.tensors:
            names = tuple(join(fqn, tensor.name) for tensor in module.tensors)
            tied = self.spec.tied_to_another()
            own = sum(t.num_bytes for name, t in zip(names, module.tensors, strict=True) if name not in tied)
            yield self._piece(names, own, position)
        for name, child in children:
            last = position
            for piece in self._cut(name, child, position):
                last = max(last, piece.position[0]) if name in self.entered else last
                yield piece
            position = last

    def _piece(self, fqns: tuple[str, ...], num_bytes: int, position: int) -> _Piece:
        self.num_pieces += 1
        return _Piece(fqns, num_bytes, (position, self.num_pieces))

    def _is_mostly_blocks(self, fqn: str) -> bool:
        """Whether never-cut modules below (not this one itself) hold most of the model's bytes."""
        return 2 * self.bytes_in_whole[fqn] > self.bytes_below[""]


def _streamed_bytes(spec: ModelSpec, index_of: Mapping[str, int]) -> Counter[int]:
    """The most that one module of each piece holds itself, tied tensors included: each module brings its own."""
    streamed: Counter[int] = Counter()
    for fqn, module in spec.modules():
        own = sum(tensor.num_bytes for tensor in module.tensors)
        keys = (fqn, *(join(fqn, tensor.name) for tensor in module.tensors))
        index = next((index_of[key] for name in keys for key in _with_ancestors(name) if key in index_of), None)
        if own and index is not None:
            streamed[index] = max(streamed[index], own)
    return streamed


@lru_cache(1 << 16)
def _with_ancestors(fqn: str) -> tuple[str, ...]:
    """`fqn`, then what contains it, up to the root."""
    return (fqn, *_with_ancestors(parent(fqn))) if fqn else ("",)


def _bytes_below(spec: ModelSpec) -> Counter[str]:
    """Bytes of all tensors at or below each module; a shared tensor counts at its owner."""
    below: Counter[str] = Counter({"": 0})
    tied = spec.tied_to_another()
    for name, tensor in spec.tensors():
        if name not in tied:
            for fqn in _with_ancestors(parent(name)):
                below[fqn] += tensor.num_bytes
    return below


def _holding_tensors(spec: ModelSpec) -> frozenset[str]:
    """Modules with a tensor at or below them."""
    return frozenset(fqn for name, _ in spec.tensors() for fqn in _with_ancestors(parent(name)))


def _first_entries(spec: ModelSpec) -> dict[str, int]:
    """Where a forward first enters each module, or anything in it."""
    entered: dict[str, int] = {}
    for index, name in enumerate(spec.execution_order):
        for fqn in _with_ancestors(name):
            entered.setdefault(fqn, index)
    return entered


def _never_cut(spec: ModelSpec) -> Iterator[str]:
    """No-split modules, and the elements of repeated ModuleLists that contain no no-split module."""
    no_split_inside = {name for fqn, module in spec.modules() if module.no_split for name in _with_ancestors(fqn)}

    def below(fqn: str, module: ModuleSpec) -> Iterator[str]:
        elements = [(join(fqn, child.name), child) for child in module.children]
        if module.no_split:
            yield fqn
        elif _is_repeated_list(module) and fqn not in no_split_inside:
            yield from (name for name, _ in elements)
        else:
            for name, child in elements:
                yield from below(name, child)

    return below("", spec.root)


def _is_repeated_list(module: ModuleSpec) -> bool:
    if module.class_name != _STACK_CLASS:
        return False
    classes = Counter(child.class_name for child in module.children)
    return max(classes.values(), default=0) > 1


def _covering(name: str, index_of: Mapping[str, int]) -> int | None:
    """The index of the piece that is, or contains, what `name` names."""
    return next((index_of[fqn] for fqn in _with_ancestors(name) if fqn in index_of), None)


def _merged_by_ties(spec: ModelSpec, index_of: Mapping[str, int], num_pieces: int) -> list[list[int]]:
    """Indices of pieces grouped by shared weights, each group at its first one's place."""
    leader = list(range(num_pieces))

    def find(index: int) -> int:
        while leader[index] != index:
            index = leader[index]
        return index

    for tie in spec.ties:
        members = [find(index) for name in tie if (index := _covering(name, index_of)) is not None]
        for member in members:
            leader[find(member)] = min(members)
    groups: dict[int, list[int]] = {}
    for index in range(num_pieces):
        groups.setdefault(find(index), []).append(index)
    return list(groups.values())


def _kv_bytes(spec: ModelSpec, index_of: Mapping[str, int], tokens: int, batch_size: int) -> Counter[int]:
    """KV cache by piece; an entry for a module above the pieces counts at the first piece in it."""
    first_below: dict[str, int] = {}
    for fqn, index in sorted(index_of.items(), key=lambda item: item[1]):
        for name in _with_ancestors(fqn):
            first_below.setdefault(name, index)
    kv_bytes: Counter[int] = Counter()
    for cache in spec.kv_cache or ():
        covering = _covering(cache.fqn, index_of)
        at = first_below.get(cache.fqn) if covering is None else covering
        if at is not None:
            kv_bytes[at] += cache.num_bytes(tokens, batch_size)
    return kv_bytes


def device_map_of(spec: ModelSpec, placement: Placement) -> dict[str, int | str]:
    """Fold a placement into a device map: disjoint keys in definition order that cover every tensor.

    A subtree on one device is one key, but the elements of the main stacks (ModuleLists with more than a
    quarter of all bytes) stay one key each, so that a map shows its layers. Those of a tower without the embedding of
    tokens don't: accelerate brings inputs to a tower that is one key, and not to one of which each layer is.
    """
    value_of = {
        fqn: device.map_value
        for block, device in zip(placement.blocks, placement.devices, strict=True)
        for fqn in block.fqns
    }
    unfolded = set(_main_stacks(spec, value_of)) | ({""} - set(value_of))
    values_below: dict[str, set[int | str]] = {}
    for fqn, value in value_of.items():
        for name in _with_ancestors(fqn):
            values_below.setdefault(name, set()).add(value)
    holding = _holding_tensors(spec)

    def keys(fqn: str, module: ModuleSpec) -> Iterator[str]:
        if fqn in value_of or (len(values_below[fqn]) == 1 and fqn not in unfolded):
            yield fqn
            return
        yield from (join(fqn, tensor.name) for tensor in module.tensors)
        for child in module.children:
            if (name := join(fqn, child.name)) in holding:
                yield from keys(name, child)

    return {key: _only(values_below[key]) for key in keys("", spec.root)} if value_of else {}


def _only(values: Iterable[int | str]) -> int | str:
    (value,) = values
    return value


def _main_stacks(spec: ModelSpec, pieces: Mapping[str, object]) -> Iterator[str]:
    """ModuleLists of which a device map names each element, and all that contains them."""
    below, embedding = _bytes_below(spec), _with_token_embedding(spec)
    for fqn, module in spec.modules():
        if module.class_name == _STACK_CLASS and below[fqn] > _MAIN_STACK_SHARE * below[""]:
            is_inside_a_piece = any(name in pieces for name in _with_ancestors(fqn))
            is_in_a_tower = bool(embedding) and not embedding.issuperset(_with_ancestors(parent(fqn)))
            yield from () if is_inside_a_piece or is_in_a_tower else _with_ancestors(fqn)


def _with_token_embedding(spec: ModelSpec) -> set[str]:
    """The modules that contain the embedding of tokens, or what is tied to it; none where it is unknown."""
    if not spec.token_embedding:
        return set()
    own = {name for name, _ in spec.tensors() if is_ancestor(spec.token_embedding, name)}
    tied = {name for group in spec.ties if not own.isdisjoint(group) for name in group}
    return {fqn for name in own | tied for fqn in _with_ancestors(name)}
