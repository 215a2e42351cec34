"""TensorStore over one chunk file that is nowhere but in memory: the referee of the codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorstore

from treering._codec.zarr import ZarrArray, zarray_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _folder(array: ZarrArray) -> tuple[Any, Any]:
    context = tensorstore.Context()
    folder = tensorstore.KvStore.open("memory://", context=context).result()
    folder[".zarray"] = zarray_bytes(array)
    return folder, context


def read_by_tensorstore(array: ZarrArray, chunk: bytes) -> NDArray[Any]:
    """Return what TensorStore reads of an array of one chunk."""
    folder, context = _folder(array)
    folder["0" if len(array.shape) < 2 else array.separator.join("0" * len(array.shape))] = chunk
    store: Any = tensorstore.open({"driver": "zarr", "kvstore": "memory://"}, context=context).result()
    return store.read().result()


def written_by_tensorstore(array: ZarrArray, items: NDArray[Any]) -> bytes:
    """Return the chunk file that TensorStore makes of an array of one chunk."""
    folder, context = _folder(array)
    store: Any = tensorstore.open({"driver": "zarr", "kvstore": "memory://"}, context=context).result()
    store.write(items).result()
    return folder["0" if len(array.shape) < 2 else array.separator.join("0" * len(array.shape))]
