"""Leaves of an opened tree -> the leaves of the result: read and checked, then left on the host or put on devices.

They come a batch at a time, so that host copies of what goes to devices do not add up.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from treering._arrays.host import jax_holds
from treering._arrays.incoming import ReadRequest, SmallChunks, StoredArrays
from treering._arrays.jobs import Progress, aligned_empty, cut_by_bytes, on_host
from treering._arrays.source import Source
from treering._format.index import leaf_bytes
from treering._plan.load import Parts
from treering._tree.likeness import KEPT, Fit, Matches
from treering._values.boxes import Box, box_of_slices, whole
from treering._values.casts import NotKept, cast_array, cast_number
from treering._values.dtypes import SUB_BYTE
from treering._values.keys import split_key
from treering.errors import CorruptError, MismatchError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# device_put of a list costs some 16 us an array whatever its size. The arguments of a jitted function are put there in
# 3 us each, but a first call with new shapes compiles for 20 ms: worth it from a thousand or two arrays alike, and kept
# for the loads that follow.
_CALL: Final = 64
_ALIKE: Final = 512
_SMALL_BYTES: Final = 64 << 10
# From so many leaves on the places of all small ones in the files are looked up at once.
_COLUMNS_FROM: Final = 64
BATCH_BYTES: Final = 256 << 20
"""Arrays are read and placed about so many bytes at a time: host copies of device arrays do not add up."""
_CAST_COUNTS: Final = 16
"""A byte that is cast counts as so many: the results stay, and what was read shall be little beside them."""
_NBYTES: Final = operator.attrgetter("nbytes")
# One call of device_put for many arrays costs half of a call for each.
_TOGETHER: Final = 256


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Way:
    """What leaves that are alike have in common on their way; each of them has the same object."""

    shape: tuple[int, ...]
    """Shape of what is stored."""
    nbytes: int
    """Bytes of what is stored, or of what this process reads of it where others read too."""
    fit: Fit
    """What it becomes."""
    sharding: jax.sharding.Sharding | None
    """Where it goes; None is the default device."""
    boxes: tuple[Box, ...]
    """What this process needs of it, each box once; nothing where all devices are others'."""
    dtype: np.dtype[Any] | None = None
    """Of what is stored, where that is not to be seen from arrays."""
    parts: Parts | None = None
    """Who reads which rows of it, where devices exchange the items; the boxes are then those of this process."""

    @property
    def on_one_device(self) -> bool:
        """Whether it goes to one device, which is this process's."""
        sharding = self.sharding
        return sharding is None or (len(sharding.device_set) == 1 and sharding.is_fully_addressable)


@dataclasses.dataclass(frozen=True, slots=True)
class Deliveries:
    """Leaves on their way, in columns of equal length."""

    numbers: list[int]
    """Their places in the result."""
    leaves: list[int]
    """Their numbers in what is stored."""
    ways: list[Way]
    """What each has in common with others."""

    def __len__(self) -> int:
        return len(self.leaves)

    def __getitem__(self, some: slice) -> Deliveries:
        return Deliveries(self.numbers[some], self.leaves[some], self.ways[some])

    @classmethod
    def join(cls, batches: Sequence[Deliveries]) -> Deliveries:
        """Return batches as one."""
        joined = cls([], [], [])
        for batch in batches:
            joined.numbers.extend(batch.numbers)
            joined.leaves.extend(batch.leaves)
            joined.ways.extend(batch.ways)
        return joined

    def take(self, places: Sequence[int]) -> Deliveries:
        """Return those at some places of the columns."""
        numbers, leaves, ways = self.numbers, self.leaves, self.ways
        return Deliveries([numbers[at] for at in places], [leaves[at] for at in places], [ways[at] for at in places])

    @property
    def nbytes(self) -> int:
        """How many bytes they are together."""
        return sum(map(_NBYTES, self.ways))

    @property
    def shardings(self) -> list[Any]:
        """Where they go, each sharding once."""
        return list(dict.fromkeys(way.sharding for way in dict.fromkeys(self.ways)))


def wanted_boxes(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> tuple[Box, ...]:
    """Return the boxes of a leaf that this process needs for a sharding, each one once; none for others' devices."""
    return (whole(shape),) if sharding is None else _own_boxes(sharding, shape)


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


def deliver(keys: Sequence[str], deliveries: Deliveries, found: list[Any], *, mapped: bool) -> list[Any]:
    """Return the leaves, in the order of ``deliveries``.

    Args:
        keys: key text of each stored leaf.
        deliveries: the leaves.
        found: what was read of each: a list of arrays, or the one that it is; let go on the way.
        mapped: whether arrays may be maps of files.
    """
    ways = deliveries.ways
    waiting: dict[tuple[Way, np.dtype[Any]], list[int]] = {}
    plain: dict[Way, list[int]] = {}  # those of them of which nothing is asked any more
    held: dict[np.dtype[Any], bool] = {}  # as jax is configured now
    for at, way in enumerate(ways):
        read = found[at]
        if (alike := plain.get(way)) is not None and not isinstance(read, list):
            alike.append(at)
            continue
        if not way.boxes:
            found[at] = without_shards(way.shape, stored_dtype_of(way), way.sharding)
            continue
        key, found[at] = keys[deliveries.leaves[at]], None
        arrays = take_arrays(read if isinstance(read, list) else [read], way, key)
        dtype = arrays[0].dtype
        if way.fit.kind in ("jax", "key") and dtype not in held:
            held[dtype] = jax_holds(dtype)
        if way.fit.kind not in ("jax", "key") or not held[dtype]:
            found[at] = _keep_on_host(arrays[0], way.fit.kind, key, mapped=mapped)
        elif way.on_one_device:
            found[at], some = arrays[0], waiting.setdefault((way, dtype), [])
            some.append(at)
            if way.fit.dtype is None and not isinstance(read, list):
                plain[way] = some
        else:
            found[at] = _put_sharded(dict(zip(way.boxes, arrays, strict=True)), way.sharding, way.shape)
    _put_waiting(waiting, found)
    finished = {way for way in dict.fromkeys(ways) if way.fit.kind == "key" or way.fit.python is not None}
    for at, way in enumerate(ways) if finished else ():
        if way in finished:
            found[at] = finish(found[at], way.fit, keys[deliveries.leaves[at]])
    return found


def _put_waiting(waiting: dict[tuple[Way, np.dtype[Any]], list[int]], found: list[Any]) -> None:
    """Put arrays that go to one device there, all those of a device together."""
    devices: dict[Any, list[list[int]]] = {}
    for (way, _), places in waiting.items():
        devices.setdefault(way.sharding, []).append(places)
    for sharding, groups in devices.items():
        arrays = put_all([list(map(found.__getitem__, places)) for places in groups], sharding)
        for places, some in zip(groups, arrays, strict=True):
            for at, array in zip(places, some, strict=True):
                found[at] = array


def without_shards(shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Any) -> jax.Array:
    """Return a leaf of which this process has nothing, since all devices of the sharding are others'."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def finish(leaf: Any, fit: Fit, key: str) -> Any:
    """Return an array as the leaf that it becomes: itself, a typed key, or a Python number."""
    if fit.kind != "key":
        return leaf if fit.python is None else fit.python(leaf)
    try:
        return jax.random.wrap_key_data(leaf, impl=fit.impl)
    except (TypeError, ValueError) as error:
        what = f"this jax has no keys {fit.impl!r} of {leaf.dtype.name}{list(leaf.shape)}"
        hint = "register the implementation, or read the numbers with treering.open"
        raise UnsupportedError(what, path=split_key(key), hint=hint) from error


def stored_dtype_of(way: Way) -> np.dtype[Any]:
    """Return the dtype of a leaf of whose items this process may have none."""
    dtype = way.fit.dtype or way.dtype
    if dtype is None:
        raise AssertionError("the dtype is set where there may be no array")
    return dtype


def take_arrays(arrays: list[NDArray[Any]], way: Way, key: str) -> list[NDArray[Any]]:
    """Return the arrays that were read of a leaf's boxes, in the dtype that is wanted."""
    dtype = way.fit.dtype
    if dtype is None:
        return arrays
    try:
        return [_cast(array, dtype, box) for array, box in zip(arrays, way.boxes, strict=True)]
    except NotKept as error:
        raise _mismatch(error, dtype.name, key) from None


def _cast(array: NDArray[Any], dtype: np.dtype[Any], box: Box) -> NDArray[Any]:
    try:
        # Many results of some MiB each: what lies between them and the next large page would add up.
        return cast_array(array, dtype, functools.partial(aligned_empty, pages=False))
    except NotKept as error:
        within = error.index or ()
        raise NotKept(error.value, tuple(at + start for at, (start, _) in zip(within, box, strict=True))) from None


def _keep_on_host(array: NDArray[Any], kind: str, key: str, *, mapped: bool) -> Any:
    try:
        leaf = on_host(array, kind, own=not mapped)
    except CorruptError as error:
        error.path = split_key(key)
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
    """Return a jitted function that returns its arguments, on the device of a sharding.

    Its arguments are donated: what jax puts on the device becomes the result, and is not copied there once more.
    """
    if sharding is None:
        return jax.jit(list, donate_argnums=0)
    return jax.jit(list, donate_argnums=0, out_shardings=sharding)


def put_all(
    groups: Sequence[list[NDArray[Any]]], sharding: jax.sharding.Sharding | None = None
) -> list[list[jax.Array]]:
    """Return the arrays on one device, bit for bit.

    Args:
        groups: each of one dtype that jax holds and one shape, in memory that nobody writes to any more: jax may take
            it as it is.
        sharding: of one device, which every result then has; None is the default device, from which jax may move them
            freely.

    Example:
        >>> import numpy as np
        >>> put_all([[np.arange(3, dtype=np.int32)]])[0][0].committed
        False
    """
    may_pass = any(len(group) >= _ALIKE for group in groups) and _may_jit()
    result: list[list[jax.Array]] = []
    rest: list[NDArray[Any]] = []
    for group in groups:
        passes = may_pass and len(group) >= _ALIKE and group[0].nbytes <= _SMALL_BYTES
        cut = len(group) // _CALL * _CALL if passes else 0
        result.append(_pass(group[:cut], sharding) if cut else [])
        rest += group[cut:]
    runs = (device_put(rest[start : start + _TOGETHER], sharding) for start in range(0, len(rest), _TOGETHER))
    others = itertools.chain.from_iterable(runs)
    for group, arrays in zip(groups, result, strict=True):
        arrays.extend(itertools.islice(others, len(group) - len(arrays)))
    return result


def _pass(arrays: list[NDArray[Any]], sharding: Any) -> list[jax.Array]:
    """Put arrays of one dtype and shape there, as arguments that come back as results."""
    passer, result = _passer(sharding), list[jax.Array]()
    with jax.transfer_guard_host_to_device("allow"):
        for start in range(0, len(arrays), _CALL):
            result += passer(arrays[start : start + _CALL])
    return result


def _may_jit() -> bool:
    """Tell whether a jitted function now does just what device_put does: no mesh is set, nothing looks at values."""
    config: Any = jax.config  # jax 0.10 does not say which settings it has
    looks = config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs
    return not looks and bool(jax.sharding.get_abstract_mesh().empty)


def plan_deliveries(source: Source, matches: Matches, placements: Sequence[Any]) -> tuple[list[Any], Deliveries]:
    """Return the leaves of the result, as far as they need no reading, and what is to be read for the others.

    Args:
        source: the opened tree.
        matches: what each leaf of the result becomes.
        placements: where each of them goes; None is the default device, or the host for what stays there.
    """
    index = source.index
    result: list[Any] = [None] * len(matches.leaves)
    found = Deliveries([], [], [])
    known: dict[tuple[int, int, int], Way] = {}
    for number, (leaf, fit, sharding) in enumerate(zip(matches.leaves, matches.fits, placements, strict=True)):
        if fit is KEPT:
            continue
        alike = (index.leaf_types[leaf], id(fit), id(sharding))
        if (way := known.get(alike)) is None:
            leaf_type = index.type_of(leaf)
            if not leaf_type.stored:
                result[number] = convert_value(index.values[leaf], fit, sharding, index.keys[leaf])
                continue
            shape = leaf_type.shape or ()
            boxes = wanted_boxes(shape, sharding)
            dtype = None if boxes else source.arrays.dtype_of(leaf)
            way = known[alike] = Way(shape, leaf_bytes(leaf_type), fit, sharding, boxes, dtype)
        found.numbers.append(number)
        found.leaves.append(leaf)
        found.ways.append(way)
    return result, found


def read_batches(
    source: Source,
    deliveries: Deliveries,
    report: ReadProgress | None = None,
    look: Callable[[Deliveries, list[Any]], None] | None = None,
) -> list[Any]:
    """Return the leaves of some deliveries, in their order.

    Args:
        source: the opened tree.
        deliveries: none of them exchanged with other processes.
        report: is told of the bytes.
        look: looks at some of them, and at what was read of each.

    Raises:
        CorruptError: bytes are damaged or not there.
        MismatchError, UnsupportedError: an array does not become what is wanted of it.
        StoreError: the system refuses.
    """
    report = report or ReadProgress(None, deliveries.nbytes)
    leaves: list[Any] = []
    # A map is no copy: nothing adds up.
    most = max(1, deliveries.nbytes) if source.mapped else BATCH_BYTES
    alike = dict(zip(deliveries.ways, deliveries.leaves, strict=True))
    copied = {way: _copied_bytes(source, leaf, way) for way, leaf in alike.items()}
    for some in cut_by_bytes(map(copied.__getitem__, deliveries.ways), most):
        batch = deliveries[some]
        found = read_leaves(source, batch, report)
        if look is not None:
            look(batch, found)
        leaves += deliver(source.index.keys, batch, found, mapped=source.mapped)
    return leaves


def read_leaves(source: Source, deliveries: Deliveries, report: ReadProgress | None) -> list[Any]:
    """Return what is read of each leaf: a list with an array for each box, or the one array of a small leaf."""
    arrays, step = source.arrays, None if report is None else report.step
    found: list[Any] = [None] * len(deliveries)
    wholes = {way for way in dict.fromkeys(deliveries.ways) if way.boxes == (whole(way.shape),)}
    chunks: Sequence[int] = ()
    if isinstance(arrays, StoredArrays) and len(deliveries) >= _COLUMNS_FROM:
        chunks = arrays.small_chunks(deliveries.leaves)
    small = SmallChunks(found)
    requests: list[tuple[int, ReadRequest]] = []
    columns = zip(deliveries.leaves, deliveries.ways, chunks or itertools.repeat(-1), strict=False)
    for at, (leaf, way, chunk) in enumerate(columns):
        if chunk >= 0 and way in wholes:
            small.places.append(at)
            small.chunks.append(chunk)
        else:
            requests.append((at, ReadRequest(leaf, way.boxes)))
    wanted = [request for _, request in requests if request.boxes]
    if small.chunks and isinstance(arrays, StoredArrays):
        arrays.read(wanted, step, small)
    else:
        arrays.read(wanted, step)
    for at, request in requests:
        found[at] = request.arrays
    if report is not None:
        report.add(deliveries.nbytes)
    return found


def _copied_bytes(source: Source, leaf: int, way: Way) -> int:
    """Return how many bytes of a leaf are copied when it is placed; none where it keeps the memory that it is read to.

    Fewer batches are faster: at the end of each one thread waits for the other.
    """
    kind = way.fit.kind
    sharding: Any = way.sharding
    if sharding is None:
        config: Any = jax.config  # jax 0.10 does not say which settings it has
        is_on_cpu = jax.default_backend() == "cpu" and config.jax_default_device is None
    else:
        is_on_cpu = all(device.platform == "cpu" for device in sharding.device_set)
    stays = kind == "numpy" or (kind == "jax" and is_on_cpu)
    if stays and way.fit.dtype is not None:
        return way.nbytes * _CAST_COUNTS  # both what was read and the result lie on the host
    if not stays or way.nbytes <= _SMALL_BYTES:
        return way.nbytes
    return way.nbytes if source.index.type_of(leaf).dtype in SUB_BYTE else 0


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
