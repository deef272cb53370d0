"""Ancestry of module names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from devmap_cli.model.names import is_ancestor, join, owner, parent

PARTS = st.lists(st.sampled_from(["model", "layers", "layer", "1", "10", "100", "mlp"]), max_size=5)
NAMES = PARTS.map(".".join)


def test_a_number_is_no_ancestor_of_a_longer_number() -> None:
    assert is_ancestor("layers.1", "layers.1.mlp")
    assert not is_ancestor("layers.1", "layers.10")
    assert not is_ancestor("layers.1", "layers.10.mlp")
    assert not is_ancestor("layers.1.mlp", "layers.1")


@given(PARTS, PARTS)
def test_ancestry_is_a_prefix_of_parts(one: list[str], other: list[str]) -> None:
    assert is_ancestor(".".join(one), ".".join(other)) == (other[: len(one)] == one)


@given(NAMES)
def test_everything_is_below_the_root_and_itself(name: str) -> None:
    assert is_ancestor("", name)
    assert is_ancestor(name, name)


@given(NAMES, st.sampled_from(["weight", "0", "proj"]))
def test_join_and_parent_undo_each_other(prefix: str, name: str) -> None:
    assert parent(join(prefix, name)) == prefix
    assert join(prefix, "") == prefix
    assert is_ancestor(prefix, join(prefix, name))


@given(NAMES, st.lists(NAMES, max_size=6))
def test_the_owner_is_the_nearest_ancestor(name: str, candidates: list[str]) -> None:
    found = owner(name, candidates)
    above = [key for key in candidates if is_ancestor(key, name)]
    if found is None:
        assert above == []
    else:
        assert found in above
        assert all(is_ancestor(key, found) for key in above)
