"""A part of a tree without some of its leaves."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from treering._format.index import Container
from treering._format.selection import Selection, drop_leaves
from treering._format.structure import iter_runs
from treering._tree.flatten import flatten

NAMES = st.sampled_from(["a", "b/c", "", "~"])
TREES = st.recursive(
    st.just(1), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=12
)


@given(tree=TREES, data=st.data())
def test_the_structure_has_the_keys_that_stay(tree: Any, data: st.DataObject) -> None:
    flat = flatten(tree)
    dropped = {key for key in flat.keys if data.draw(st.booleans())}
    part = Selection(structure=flat.tokens, leaves=range(10, 10 + len(flat.keys)), keys=flat.keys)
    rest = drop_leaves(part, dropped)
    stay = [(number, key) for number, key in enumerate(flat.keys, 10) if key not in dropped]
    assert list(zip(rest.leaves, rest.keys, strict=True)) == stay
    heads = [token for token in rest.structure if isinstance(token, Container)]
    # Only of a leaf that is the whole tree nothing is left.
    if rest.structure:
        assert [above + name for above, names in iter_runs(rest.structure) for name in names] == rest.keys
    assert len(heads) == sum(isinstance(token, Container) for token in flat.tokens)
