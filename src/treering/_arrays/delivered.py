"""Leaves of an opened tree -> the leaves of the result: read and checked, then left on the host or put on devices.

They come a batch at a time, so that host copies of what goes to devices do not add up.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from treering._arrays.host import jax_holds
from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import Progress, on_host, split_by_bytes
from treering._arrays.source import Source
from treering._format.index import leaf_bytes
from treering._plan.exchange import Parts
from treering._tree.likeness import KEPT, Fit, LeafMatch
from treering._values.boxes import Box, box_of_slices, whole
from treering._values.casts import NotKept, cast_array, cast_number
from treering._values.dtypes import SUB_BYTE
from treering._values.keys import split_key
from treering.errors import CorruptError, MismatchError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# device_put costs some 45 us an array whatever its size. The arguments of a jitted function are put there in 5 us each,
# but a first call with new shapes compiles for 20 ms: worth it from some five hundred arrays alike.
_CALL: Final = 64
_ALIKE: Final = 512
_SMALL_BYTES: Final = 64 << 10
BATCH_BYTES: Final = 256 << 20
"""Arrays are read and placed about so many bytes at a time: host copies of device arrays do not add up."""
_NBYTES: Final = operator.attrgetter("nbytes")
# One call of device_put for many arrays costs half of a call for each.
_TOGETHER: Final = 256


@dataclasses.dataclass(slots=True)
class Delivery:
    """One leaf on its way."""

    number: int
    """Its place in the result."""
    key: str
    """Key text of what is stored."""
    request: ReadRequest
    """Its boxes."""
    shape: tuple[int, ...]
    """Shape of what is stored."""
    nbytes: int
    """Bytes of what is stored."""
    fit: Fit
    """What it becomes."""
    sharding: jax.sharding.Sharding | None
    """Where it goes; None is the default device."""
    dtype: np.dtype[Any] | None = None
    """Of what is stored, where that is not to be seen from arrays."""
    parts: Parts | None = None
    """Who reads which rows of it, where devices exchange the items; the boxes are then those of this process."""


def request_for(leaf: int, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> ReadRequest:
    """Return the boxes of a leaf that this process needs for a sharding, each one once; none for others' devices."""
    if sharding is None:
        return ReadRequest(leaf, (whole(shape),))
    if sharding.is_fully_replicated:
        return ReadRequest(leaf, (whole(shape),) if sharding.addressable_devices else ())
    return ReadRequest(leaf, _own_boxes(sharding, shape))


@functools.lru_cache(maxsize=1024)
def _own_boxes(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return the boxes on this process's devices, each one once; most leaves of a model share their shardings."""
    places = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(box_of_slices(index, shape) for index in places if index is not None))


def process_of(device: jax.Device) -> int:
    """Return the process that a device belongs to."""
    return int(device.process_index)


def spans(sharding: Any) -> bool:
    """Tell whether the devices of a sharding belong to several processes."""
    return sharding is not None and len(_owners(sharding, process_of)) > 1


@functools.lru_cache(maxsize=1024)
def _owners(sharding: jax.sharding.Sharding, owner: Any) -> frozenset[int]:
    return frozenset(map(owner, sharding.device_set))


def convert_value(value: Any, fit: Fit, sharding: jax.sharding.Sharding | None, key: str) -> Any:
    """Return a Python value as what it becomes: itself, another number, or an array without axes.

    Raises:
        MismatchError: it does not fit there; ``key`` names the leaf.
    """
    wanted = fit.dtype if fit.python is None else np.dtype(fit.python)
    if wanted is None:
        return value
    try:
        array = cast_number(value, wanted)
    except NotKept as error:
        raise _mismatch(error, wanted.name if fit.python is None else fit.python.__name__, key) from None
    if fit.python is not None:
        return array.item()
    if fit.kind != "jax":
        return on_host(array, fit.kind)
    if sharding is None or sharding.is_fully_addressable:
        return device_put(array, sharding)
    if not sharding.addressable_devices:
        return without_shards(array.shape, array.dtype, sharding)
    # To put it on others' devices too, jax would ask all processes whether they have the same.
    return _put_by_boxes(array.shape, sharding, lambda index: array[index])


def deliver(deliveries: Sequence[Delivery], *, mapped: bool) -> list[Any]:
    """Return the leaves, in the order of ``deliveries``, whose arrays are let go on the way."""
    result: list[Any] = [None] * len(deliveries)
    waiting: dict[jax.sharding.Sharding | None, list[tuple[int, NDArray[Any]]]] = {}
    held: dict[np.dtype[Any], bool] = {}  # as jax is configured now
    for at, delivery in enumerate(deliveries):
        if not delivery.request.boxes:
            result[at] = without_shards(delivery.shape, stored_dtype_of(delivery), delivery.sharding)
            continue
        arrays, fit, sharding = take_arrays(delivery), delivery.fit, delivery.sharding
        dtype = arrays[0].dtype
        if fit.kind in ("jax", "key") and dtype not in held:
            held[dtype] = jax_holds(dtype)
        if fit.kind not in ("jax", "key") or not held[dtype]:
            result[at] = _keep_on_host(arrays[0], delivery, mapped=mapped)
        elif sharding is None or (len(sharding.device_set) == 1 and sharding.is_fully_addressable):
            waiting.setdefault(sharding, []).append((at, arrays[0]))
        else:
            result[at] = _put_sharded(dict(zip(delivery.request.boxes, arrays, strict=True)), sharding, delivery.shape)
    for one_device, some in waiting.items():
        for (at, _), array in zip(some, put_all([array for _, array in some], one_device), strict=True):
            result[at] = array
    for at, delivery in enumerate(deliveries):
        if delivery.fit.kind == "key" or delivery.fit.python is not None:
            result[at] = finish(result[at], delivery)
    return result


def without_shards(shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Any) -> jax.Array:
    """Return a leaf of which this process has nothing, since all devices of the sharding are others'."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def finish(leaf: Any, delivery: Delivery) -> Any:
    """Return an array as the leaf that it becomes: itself, a typed key, or a Python number."""
    if delivery.fit.kind != "key":
        return leaf if delivery.fit.python is None else delivery.fit.python(leaf)
    try:
        return jax.random.wrap_key_data(leaf, impl=delivery.fit.impl)
    except (TypeError, ValueError) as error:
        what = f"this jax has no keys {delivery.fit.impl!r} of {leaf.dtype.name}{list(leaf.shape)}"
        hint = "register the implementation, or read the numbers with treering.open"
        raise UnsupportedError(what, path=split_key(delivery.key), hint=hint) from error


def stored_dtype_of(delivery: Delivery) -> np.dtype[Any]:
    """Return the dtype of a leaf of whose items this process may have none."""
    dtype = delivery.fit.dtype or delivery.dtype
    if dtype is None:
        raise AssertionError("the dtype is set where there may be no array")
    return dtype


def take_arrays(delivery: Delivery) -> list[NDArray[Any]]:
    """Take the arrays of a delivery, in the dtype that is wanted."""
    arrays, delivery.request.arrays = delivery.request.arrays, []
    dtype = delivery.fit.dtype
    if dtype is None:
        return arrays
    try:
        return [_cast(array, dtype, box) for array, box in zip(arrays, delivery.request.boxes, strict=True)]
    except NotKept as error:
        raise _mismatch(error, dtype.name, delivery.key) from None


def _cast(array: NDArray[Any], dtype: np.dtype[Any], box: Box) -> NDArray[Any]:
    try:
        return cast_array(array, dtype)
    except NotKept as error:
        within = error.index or ()
        raise NotKept(error.value, tuple(at + start for at, (start, _) in zip(within, box, strict=True))) from None


def _keep_on_host(array: NDArray[Any], delivery: Delivery, *, mapped: bool) -> Any:
    try:
        leaf = on_host(array, delivery.fit.kind, own=not mapped)
    except CorruptError as error:
        error.path = split_key(delivery.key)
        raise
    if mapped and isinstance(leaf, np.ndarray):
        leaf.flags.writeable = False  # those that were read too: nobody can tell which were
    return leaf


def _mismatch(error: NotKept, dtype: str, key: str) -> MismatchError:
    hint = "cast=True rounds floats, and changes no other number"
    return MismatchError(f"{error} does not fit {dtype}", path=split_key(key), hint=hint)


def device_put(arrays: Any, sharding: Any) -> Any:
    """Put arrays on their devices, whatever guard the user has set."""
    # The user's guard is against copies that nobody asked for; this one was, and so are those below.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.device_put(arrays, sharding)


def _put_sharded(by_box: dict[Box, NDArray[Any]], sharding: Any, shape: tuple[int, ...]) -> jax.Array:
    return _put_by_boxes(shape, sharding, lambda index: by_box[box_of_slices(index or (), shape)])


def _put_by_boxes(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, box_at: Callable[[Any], NDArray[Any]]
) -> jax.Array:
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(shape, sharding, box_at)


@functools.lru_cache(maxsize=64)
def _passer(sharding: jax.sharding.Sharding | None) -> Callable[[list[Any]], list[jax.Array]]:
    """Return a jitted function that returns its arguments, on the device of a sharding."""
    return jax.jit(list) if sharding is None else jax.jit(list, out_shardings=sharding)


def put_all(arrays: Sequence[NDArray[Any]], sharding: jax.sharding.Sharding | None = None) -> list[jax.Array]:
    """Return the arrays on one device, bit for bit.

    Args:
        arrays: of dtypes that jax holds, in memory that nobody writes to any more: jax may take it as it is.
        sharding: of one device, which every result then has; None is the default device, from which jax may move them
            freely.

    Example:
        >>> import numpy as np
        >>> put_all([np.arange(3, dtype=np.int32)])[0].committed
        False
    """
    result: list[Any] = [None] * len(arrays)
    rest: list[int] = []
    if len(arrays) >= _ALIKE and _may_jit():
        alike: dict[Any, list[int]] = {}
        for number, array in enumerate(arrays):
            key = (array.dtype, array.shape) if array.nbytes <= _SMALL_BYTES else None
            alike.setdefault(key, []).append(number)
        for key, numbers in alike.items():
            cut = len(numbers) // _CALL * _CALL if key is not None and len(numbers) >= _ALIKE else 0
            rest += numbers[cut:]
            _pass(arrays, numbers[:cut], sharding, result)
    else:
        rest = list(range(len(arrays)))
    for start in range(0, len(rest), _TOGETHER):
        numbers = rest[start : start + _TOGETHER]
        for number, array in zip(numbers, device_put([arrays[n] for n in numbers], sharding), strict=True):
            result[number] = array
    return result


def _pass(arrays: Sequence[NDArray[Any]], numbers: Sequence[int], sharding: Any, result: list[Any]) -> None:
    """Put arrays of one dtype and shape there, as arguments that come back as results."""
    passer = _passer(sharding)
    with jax.transfer_guard_host_to_device("allow"):
        for start in range(0, len(numbers), _CALL):
            some = numbers[start : start + _CALL]
            for number, array in zip(some, passer([arrays[n] for n in some]), strict=True):
                result[number] = array


def _may_jit() -> bool:
    """Tell whether a jitted function now does just what device_put does: no mesh is set, nothing looks at values."""
    config: Any = jax.config  # jax 0.10 does not say which settings it has
    looks = config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs
    return not looks and bool(jax.sharding.get_abstract_mesh().empty)


def plan_deliveries(
    source: Source, matches: Sequence[LeafMatch], placements: Sequence[Any]
) -> tuple[list[Any], list[Delivery]]:
    """Return the leaves of the result, as far as they need no reading, and what is to be read for the others.

    Args:
        source: the opened tree.
        matches: what each leaf of the result becomes.
        placements: where each of them goes; None is the default device, or the host for what stays there.
    """
    index = source.index
    result: list[Any] = [None] * len(matches)
    deliveries: list[Delivery] = []
    by_type = list(map(leaf_bytes, index.types))
    for number, (match, sharding) in enumerate(zip(matches, placements, strict=True)):
        if match.fit is KEPT:
            continue
        leaf_type, key = index.type_of(match.leaf), index.keys[match.leaf]
        if leaf_type.stored:
            shape = leaf_type.shape or ()
            request = request_for(match.leaf, shape, sharding)
            nbytes = by_type[index.leaf_types[match.leaf]]
            dtype = None if request.boxes else source.arrays.dtype_of(match.leaf)
            deliveries.append(Delivery(number, key, request, shape, nbytes, match.fit, sharding, dtype))
        else:
            result[number] = convert_value(index.values[match.leaf], match.fit, sharding, key)
    return result, deliveries


def read_batches(
    source: Source,
    deliveries: Sequence[Delivery],
    report: ReadProgress | None = None,
    look: Callable[[Sequence[Delivery]], None] | None = None,
) -> list[Any]:
    """Return the leaves of some deliveries, in their order.

    Args:
        source: the opened tree.
        deliveries: none of them exchanged with other processes.
        report: is told of the bytes.
        look: looks at what was read of some of them.

    Raises:
        CorruptError: bytes are damaged or not there.
        MismatchError, UnsupportedError: an array does not become what is wanted of it.
        StoreError: the system refuses.
    """
    total = sum(delivery.nbytes for delivery in deliveries)
    report = report or ReadProgress(None, total)
    leaves: list[Any] = []
    # A map is no copy: nothing adds up.
    most = total if source.mapped else BATCH_BYTES
    for batch, _ in split_by_bytes(deliveries, functools.partial(_copied_bytes, source), most):
        source.arrays.read([delivery.request for delivery in batch if delivery.request.boxes], report.step)
        report.add(sum(map(_NBYTES, batch)))
        if look is not None:
            look(batch)
        leaves += deliver(batch, mapped=source.mapped)
    return leaves


def _copied_bytes(source: Source, delivery: Delivery) -> int:
    """Return how many bytes of a leaf are copied when it is placed; none where it keeps the memory that it is read to.

    Fewer batches are faster: at the end of each one thread waits for the other.
    """
    kind = delivery.fit.kind
    sharding: Any = delivery.sharding
    if sharding is None:
        config: Any = jax.config  # jax 0.10 does not say which settings it has
        is_on_cpu = jax.default_backend() == "cpu" and config.jax_default_device is None
    else:
        is_on_cpu = all(device.platform == "cpu" for device in sharding.device_set)
    stays = kind == "numpy" or (kind == "jax" and is_on_cpu)
    if not stays or delivery.fit.dtype is not None or delivery.nbytes <= _SMALL_BYTES:
        return delivery.nbytes
    return delivery.nbytes if source.index.type_of(delivery.request.leaf).dtype in SUB_BYTE else 0


class ReadProgress:
    """Adds batches up for the user's ``progress``, which counts the bytes of the leaves.

    Args:
        progress: the user's, or None.
        total: bytes of all leaves.

    Attributes:
        step: what is told of the bytes of one batch; None where nobody listens.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._before = 0
        self.step: Progress | None = self._step if progress else None

    def _step(self, done: int, batch: int) -> None:
        del batch
        if self._progress is not None:
            self._progress(min(self._before + done, self._total), self._total)

    def add(self, nbytes: int) -> None:
        """Count a batch that is done."""
        self._before += nbytes
