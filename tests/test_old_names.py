"""Names and options of an earlier version lead to the new ones, or are refused by an error that names these."""

import builtins
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treering as tr
from tests.reads import defaults_of_loads

CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "save form": (lambda path: tr.save(path, {}, form="hf"), "no option 'form': call treering.export"),  # type: ignore[call-arg]
    "save key_map": (lambda path: tr.save(path, {}, key_map=None), "pass it to treering.export"),  # type: ignore[call-arg]
    "load": (lambda path: tr.load(path, {}, rename={}), "no option 'rename': pass the dict as key_map="),  # type: ignore[call-overload]
    "convert": (lambda path: tr.convert(path, target=path), "no option 'target': it is called path"),  # type: ignore[call-arg]
    "Run.load": (lambda path: tr.Run(path).load(rename={}), "pass the dict as key_map="),  # type: ignore[call-overload]
    "Run.save": (
        lambda path: tr.Run(path).save(1, {}, overwrite=True),  # type: ignore[call-arg]
        "no option 'overwrite': it is called rollback",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_moved_option_is_named(call: str, tmp_path: Path) -> None:
    door, said = CALLS[call]
    with pytest.raises(TypeError, match=said):
        door(tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [tr.load, tr.Run("runs/nothing").load])
def test_load_and_run_load_take_the_same_options(call: Callable[..., Any]) -> None:
    taken = inspect.signature(call).parameters.values()
    options = [one.name for one in taken if one.kind is one.KEYWORD_ONLY]
    own = [] if call is tr.load else ["fallback"]  # a run has older steps
    assert options == own + list(tr.checkpoint.LoadKeywords.__annotations__)
    assert len(options) <= 12
    assert all(isinstance(one.annotation, str) for one in taken)
    defaults = defaults_of_loads()
    assert all(one.default == defaults[one.name] for one in taken if one.name in options[len(own) :])
    with pytest.raises(TypeError, match=r"^load\(\) got an unexpected keyword argument 'shape'$"):
        call(like={}, shape=3)


@pytest.mark.parametrize("call", [tr.load, tr.load_async, tr.Run("runs/nothing").load])
def test_a_mistyped_option_of_a_load_is_told_with_the_one_that_is_like_it(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'sharding'\. Did you mean 'shardings'\?$"):
        call(like={}, sharding=None)


MOVED = {
    "": {
        "checkpoint": "Checkpoint ForeignKey LeafView OpaqueLeaf PendingSave StandIn register_node",
        "rules": "KeepSteps",
        "run": "Stateful",
    },
    "sharding": {"checkpoint": "Shardings"},
    "tree": {"checkpoint": "uncompared"},
}


@pytest.mark.parametrize(
    ("door", "name", "home"),
    [(door, name, home) for door, homes in MOVED.items() for home, names in homes.items() for name in names.split()],
)
def test_a_moved_name_leads_to_where_it_is_now(door: str, name: str, home: str) -> None:
    module = importlib.import_module(f"treering.{door}".rstrip("."))
    with pytest.warns(DeprecationWarning, match=rf"{name} is treering\.{home}\.{name} now") as warned:
        found = getattr(module, name)
    assert found is getattr(importlib.import_module(f"treering.{home}"), name)
    assert warned[0].filename == __file__
    assert name not in module.__all__


def test_the_root_has_few_names() -> None:
    assert len(tr.__all__) <= 30


OF_PEERS = {
    "serialization": "MAX_CHUNK_SIZE compress_bytes current_path decompress_bytes from_bytes from_compressed_bytes"
    " from_state_dict get_serialization_info is_serializable load_from_file msgpack_restore msgpack_serialize"
    " register_serialization_state save_to_file to_bytes to_compressed_bytes to_state_dict validate_serializable",
    "leaves": "index_leaves is_array_like join_key leaf_key_paths tree_deserialize_leaves tree_serialize_leaves",
    "sharding": "RulesReport apply_sharding_tree create_sharding_tree_from_index make_itsharded match_partition_rules"
    " validate_sharding_tree",
    "tree": "tree_bytes tree_map_with_path tree_size",
}


@pytest.mark.parametrize("door", OF_PEERS)
def test_the_drop_in_doors_hold_the_names_of_the_peers(door: str) -> None:
    """Beside them: `index_leaves` for saves without an index, `join_key`, and the argument of ``report=``."""
    assert sorted(importlib.import_module(f"treering.{door}").__all__) == OF_PEERS[door].split()


OLD_ERRORS = {"NotFound": "NotFoundError", "Timeout": "TimedOutError", "StoreFailed": "StoreError"}
OLD_WARNINGS = {"KeptOnHost": "KeptOnHostWarning", "NotFenced": "NotFencedWarning"}


@pytest.mark.parametrize("name", OLD_ERRORS | OLD_WARNINGS)
def test_an_old_name_of_an_error_leads_to_the_class(name: str) -> None:
    new = (OLD_ERRORS | OLD_WARNINGS)[name]
    with pytest.warns(DeprecationWarning, match=f"treering.errors.{name} is called {new} now"):
        found = getattr(tr.errors, name)
    assert found is getattr(tr.errors, new)


def test_an_except_clause_of_before_still_catches(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="NotFoundError"), pytest.raises(tr.errors.NotFound):  # type: ignore[attr-defined]
        tr.load(tmp_path / "nothing")


def test_every_error_ends_as_those_of_python_and_shadows_none() -> None:
    for name in tr.errors.__all__:
        found = getattr(tr.errors, name)
        assert name.endswith("Warning" if issubclass(found, Warning) else "Error")
        assert not hasattr(builtins, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = tr.errors.Nothing  # type: ignore[attr-defined]
