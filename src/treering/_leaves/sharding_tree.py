"""A leaves directory -> a tree of shardings for what is in it, before an array is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from treering._checkpoint.folder_path import folder_path
from treering._format.dict_structure import as_dicts
from treering._format.index import ARRAY_KINDS, LeafType
from treering._format.structure import build
from treering._leaves.branches import judged_leaves
from treering._leaves.documents.record import stored_leaves
from treering._leaves.folder.leaves_folder import OpenLeaves
from treering._printable import kind_of
from treering._tree.placement import is_placement, require_mesh
from treering._tree.rules import spec_of
from treering.errors import Mismatch, Unsupported


def create_sharding_tree_from_index(
    checkpoint_dir: str | os.PathLike[str],
    mesh: Mesh | None = None,
    prefix: str | None = None,
    default_sharding: Any = None,
) -> Any:
    """Return a tree of shardings for a leaves directory, of the form in which its tree is loaded by default.

    That is: nested dicts with text for keys, a place for every leaf, and None where a leaf is no array. It fits
    `treering.leaves.tree_deserialize_leaves` and `apply_sharding_tree` as it is. No array is read.

    Args:
        checkpoint_dir: the directory.
        mesh: what a partition spec is meant for.
        prefix: which tree of the directory; None or "" is the one without prefix.
        default_sharding: for every array. A ``Sharding`` or ``PartitionSpec``, cut to the axes that the array has; a
            ``Device``; a function of a dict with the "path" of the array's folder, its "shape" and its "dtype", whose
            result is taken as it is; or None: replicated on ``mesh``, or None where there is no mesh, or where the
            array was saved as numpy and may stay so.

    Raises:
        NotFound: there is no directory or no index.
        Mismatch: no tree has this prefix, those there are named; a partition spec has axes that the mesh lacks.
        Unsupported: a partition spec without mesh, or what is no sharding.
        Corrupt, Format: the index is damaged, or not one that this version reads.

    Source: eformer.serialization.sharding_utils.create_sharding_tree_from_index.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> from treering.leaves import tree_serialize_leaves
        >>> tree_serialize_leaves("ckpt", {"layers": [jax.numpy.ones((4, 2))], "scale": jax.numpy.float32(1)})
        >>> mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
        >>> tree = create_sharding_tree_from_index("ckpt", mesh, default_sharding=P("d"))
        >>> tree["layers"]["0"].spec == P("d"), tree["scale"].spec == P()
        (True, True)
    """
    require_mesh(mesh)
    place_of = _place_of(default_sharding, mesh)
    with OpenLeaves(folder_path(checkpoint_dir)) as folder:
        [branch] = judged_leaves(folder, prefix=prefix).branches
    record = branch.record
    places: list[Any] = [None] * len(record.keys)
    for leaf, path in zip(stored_leaves(record), record.folders, strict=True):
        kind = record.types[record.leaf_types[leaf]]
        if kind.kind in ARRAY_KINDS:
            places[leaf] = place_of(path, kind)
    return build(as_dicts(record.structure), places)


def _place_of(default: Any, mesh: Mesh | None) -> Callable[[str, LeafType], Any]:
    """Return what chooses the sharding of an array by its folder and type."""
    if default is None:
        everywhere = None if mesh is None else NamedSharding(mesh, spec_of())
        return lambda _path, kind: everywhere if kind.kind in ("jax", "key") else None
    if isinstance(default, PartitionSpec):
        if mesh is None:
            raise Unsupported(f"default_sharding is {default}, which says nothing without a mesh", hint="give mesh=")
        default = _on(mesh, default)
    if is_placement(default):
        return lambda _path, kind: _cut(default, len(_shape(kind)))
    if callable(default):
        return lambda path, kind: default({"path": path, "shape": list(_shape(kind)), "dtype": kind.dtype})
    raise Unsupported(
        f"default_sharding is {kind_of(default)}", hint="a Sharding, PartitionSpec, Device, function or None"
    )


def _on(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    try:
        return NamedSharding(mesh, spec)
    except ValueError as error:  # an axis that the mesh does not have, or one twice
        raise Mismatch(f"default_sharding does not fit the mesh: {error}") from None


def _shape(kind: LeafType) -> tuple[int, ...]:
    """Return the shape that the array has on devices: a key's data has one axis more than the key."""
    shape = kind.shape or ()
    return shape[:-1] if kind.kind == "key" else shape


def _cut(sharding: Any, axes: int) -> Any:
    """Return the sharding for no more axes than there are."""
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= axes:
        return sharding
    spec = spec_of(*tuple(sharding.spec)[:axes])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
