"""What each store must do, as tests: for the stores of treering, and for those of others."""

from __future__ import annotations

import abc
import functools
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from treering._codec.key_document import INDEX_FORM, encode_tombstone, is_tombstone
from treering._coordination.message_board import FolderMessageBoard, MessageBoard
from treering._store.api import Held, Kind, Outcome, Store, Transaction, open_below
from treering._values.checkpoint_names import heartbeat_name, vote_name
from treering.errors import CorruptError, NotFoundError

_LARGE = 3 << 20
_REPLACED_SIZE = 50_000
_TIMES_REPLACED = 200
_NAMES = ("a b", "\u00e4\u00f6\u2603", "%41", "#", "+", "a&b=c", ".hidden", "..a", "x" * 200, "-rf", "~", "a:b", "CON")
_THREADS = 4
_ROUNDS = 8
_CLOCKS_DIFFER = 3600
_ANOTHER = INDEX_FORM.encode([("attempt", "0" * 16), ("files", []), ("replaces", [])])
_ONE, _TWO = heartbeat_name(1), heartbeat_name(2)


class MessageBoardContract(abc.ABC):
    """What keeps messages must do, as tests: name a subclass ``Test...``, and pytest runs them.

    Example:
        >>> from treering.testing import MemoryStore
        >>> class TestMessagesInMemory(MessageBoardContract):
        ...     def make_board(self):
        ...         return FolderMessageBoard(MemoryStore())
        >>> TestMessagesInMemory().test_what_was_put_is_read()
    """

    @abc.abstractmethod
    def make_board(self) -> MessageBoard:
        """Return a board without messages."""

    def test_what_was_put_is_read(self) -> None:
        """Content comes back, that of each name by itself, and may be empty."""
        board = self.make_board()
        contents = {_ONE: b"one", _TWO: b"", vote_name("0" * 16, 1): bytes(range(256))}
        for name, data in contents.items():
            board.put(name, data)
        for name, data in contents.items():
            _require_same(board.get(name), data)

    def test_what_was_not_put_is_not_there(self) -> None:
        """A name without content is None, not an error."""
        board = self.make_board()
        _require_same(board.get(_ONE), None)
        board.put(_ONE, b"one")
        _require_same(board.get(_TWO), None)

    def test_the_last_put_counts(self) -> None:
        """Content is replaced as a whole, by shorter and by longer one."""
        board = self.make_board()
        for data in (b"one", b"a much longer one", b"x", b""):
            board.put(_ONE, data)
            _require_same(board.get(_ONE), data)

    def test_what_was_removed_is_gone(self) -> None:
        """Removing is no error where nothing is; a name can be used again."""
        board = self.make_board()
        board.remove_all([_ONE])
        board.put(_ONE, b"one")
        board.put(_TWO, b"two")
        board.remove_all([_ONE])
        board.remove_all([_ONE])
        _require_same(board.get(_ONE), None)
        _require_same(board.get(_TWO), b"two")
        board.put(_ONE, b"again")
        _require_same(board.get(_ONE), b"again")

    def test_large_content(self) -> None:
        """A few megabytes are one message too."""
        board = self.make_board()
        data = bytes(range(256)) * (_LARGE // 256)
        board.put(_ONE, data)
        _require_same(board.get(_ONE), data)

    def test_replacing_is_one_step(self) -> None:
        """Who reads while another replaces gets the old content or the new one, never nothing and never a mixture."""
        board = self.make_board()
        board.put(_ONE, bytes(_REPLACED_SIZE))

        def replace() -> None:
            for number in range(_TIMES_REPLACED):
                board.put(_ONE, bytes([number % 256]) * _REPLACED_SIZE)

        with ThreadPoolExecutor(1) as pool:
            writer = pool.submit(replace)
            while not writer.done():
                found = board.get(_ONE) or b""
                if len(found) != _REPLACED_SIZE or len(set(found)) != 1:
                    raise AssertionError(f"a reader got a mixture, or nothing: {found!r:.80}")
        writer.result()
        _require_same(board.get(_ONE), bytes([(_TIMES_REPLACED - 1) % 256]) * _REPLACED_SIZE)


class StoreContract(MessageBoardContract):
    """All that a store must do, as tests: name a subclass ``Test...``, say how to make a store, and pytest runs them.

    Example:
        >>> from treering.testing import MemoryStore
        >>> class TestMemoryStore(StoreContract):
        ...     def make_store(self):
        ...         return MemoryStore()
        >>> TestMemoryStore().test_a_late_or_repeated_replacement_is_lost()
    """

    @abc.abstractmethod
    def make_store(self) -> Store:
        """Return an empty store, which is open."""

    def open_again(self, store: Store) -> Store:
        """Return the same place, opened by another writer; the store itself where that makes no difference."""
        return store

    def make_board(self) -> MessageBoard:
        """Return the messages in an empty store."""
        return FolderMessageBoard(self.make_store())

    def _begin(self) -> tuple[Store, Transaction]:
        store = self.make_store()
        transaction = store.transaction("document")
        transaction.begin("marker", None)
        return store, transaction

    def test_any_name(self) -> None:
        """A name is any text without a slash that is not empty, ``.`` or ``..``."""
        store = self.make_store()
        for name in _NAMES:
            store.create(name, [name.encode()], len(name.encode()))
        store.flush()
        _require(sorted(store.names()) == sorted(_NAMES), "a name is missing")
        for name in _NAMES:
            _require_content(store, name, name.encode())
            store.remove(name)
        _require(not store.names(), "a name stays")

    def test_data_are_created_once(self) -> None:
        """Data come in pieces of any size, also in one buffer again and again, and replace nothing."""
        store = self.make_store()
        store.create("data", [b"tree", memoryview(b"ring"), bytearray(_LARGE)], 8 + _LARGE)
        _require_content(store, "data", b"treering" + bytes(_LARGE))
        _require_refused(lambda: store.create("data", [b"x"], 1), FileExistsError)
        for count in (1, 3):
            _require_refused(functools.partial(store.create, f"wrong {count}", [b"xx"], count), OSError)
        _require_content(store, "data", b"treering" + bytes(_LARGE))
        room = bytearray(_LARGE)

        def fill_again() -> Iterator[bytearray]:
            for byte in range(3):
                room[:] = bytes([byte]) * _LARGE
                yield room

        store.create("again", fill_again(), 3 * _LARGE)
        _require_content(store, "again", b"".join(bytes([byte]) * _LARGE for byte in range(3)))

    def test_ranges(self) -> None:
        """Any range is read, also into memory of the caller; what is not there is an error, never fewer bytes."""
        store = self.make_store()
        data = secrets.token_bytes(100_000)
        store.create("data", [data], len(data))
        with store.open_file("data") as file:
            _require(file.size == len(data), "the size is wrong")
            for start, count in ((0, 0), (0, 10), (99_990, 10), (1, 99_999), (100_000, 0)):
                _require_same(file.read(start, count), data[start : start + count])
            room = bytearray(70_000)
            file.read_into([(5, memoryview(room)[:30_000]), (60_000, memoryview(room)[30_000:])])
            _require_same(bytes(room), data[5:30_005] + data[60_000:])
            _require_same(bytes(file.map()), data)
            for start, count in ((-1, 1), (0, -1), (0, 100_001), (100_000, 1), (1 << 60, 1 << 60)):
                _require_refused(functools.partial(file.read, start, count), CorruptError)
            _require_refused(lambda: file.read_into([(99_999, memoryview(bytearray(2)))]), CorruptError)
        _require_refused(lambda: store.open_file("nothing"), NotFoundError)

    def test_what_is_open_stays_whole(self) -> None:
        """A reader keeps what it has opened, whatever becomes of the name."""
        store = self.make_store()
        store.replace("document", b"old")
        with store.open_file("document") as file:
            store.replace("document", b"newer")
            _require_same(file.read(0, 3), b"old")
            store.remove("document")
            _require_same(file.read(0, 3), b"old")

    def test_what_is_known_of_a_name(self) -> None:
        """Size, time and version come without reading; nothing is None."""
        store = self.make_store()
        begun = time.time()
        store.create("data", [b"four"], 4)
        found = store.find("data")
        _require(found is not None and (found.size, found.kind) == (4, Kind.FILE), "an entry is wrong")
        _require(found is not None and abs(found.modified - begun) < _CLOCKS_DIFFER, "a time is wrong")
        _require(store.find("nothing") is None and store.find("data/x") is None, "nothing is something")
        _require(store.read("nothing") is None, "nothing has content")
        document = store.read("data", 2)
        _require_same(document.data if document else None, b"fo")

    def test_a_document_is_replaced_by_version(self) -> None:
        """Only the expected version is replaced; None expects nothing there."""
        store = self.make_store()
        _require(store.replace("document", b"a 1", None) is Outcome.DONE, "a first one is refused")
        _require(store.replace("document", b"b 2", None) is Outcome.LOST, "something is replaced as nothing")
        first = _version(store, "document")
        _require(store.replace("document", b"c 3", first) is Outcome.DONE, "the expected version is refused")
        _require(_version(store, "document") != first, "a version stays")
        _require_content(store, "document", b"c 3")

    def test_a_late_or_repeated_replacement_is_lost(self) -> None:
        """A request that arrives again, or after another one, changes nothing."""
        store = self.make_store()
        store.replace("document", b"base 0")
        base = _version(store, "document")
        for outcome in (Outcome.DONE, Outcome.LOST, Outcome.LOST):
            _require(store.replace("document", b"mine 1", base) is outcome, "a repeated request is not lost")
        store.replace("document", b"another 2", _version(store, "document"))
        _require(store.replace("document", b"mine 1", base) is Outcome.LOST, "a late request is not lost")
        _require_content(store, "document", b"another 2")
        store.remove("document")
        _require(store.replace("document", b"mine 1", base) is Outcome.LOST, "a late request brings back what is gone")
        _require(store.find("document") is None, "a document is back")

    def test_names_are_removed(self) -> None:
        """One or several at once, of which some may be gone already."""
        store = self.make_store()
        for name in ("one", "two", "three"):
            store.replace(name, b"old 1")
        store.remove("one")
        store.remove("one", "two", "nothing")
        store.remove()
        _require(store.names() == ["three"], "a name stays, or too much is gone")

    def test_one_of_many_wins(self) -> None:
        """Of those who replace the same version at once one is told that it is done, and it is."""
        store = self.make_store()
        store.replace("count", b"0 ")

        def count(_: int) -> None:
            for _ in range(_ROUNDS):
                outcome = Outcome.LOST
                while outcome is not Outcome.DONE:
                    found = store.read("count")
                    number = int(found.data.split()[0]) if found else 0
                    new = b"%d %s" % (number + 1, secrets.token_hex(8).encode())
                    outcome = store.replace("count", new, found.version if found else None)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(count, range(_THREADS)))
        _require((_content(store, "count") or b"").split()[0] == b"%d" % (_THREADS * _ROUNDS), "a change is lost")

    def test_places_and_prefixes(self) -> None:
        """Places lie in places; a listing goes through all of them by prefix."""
        store = self.make_store()
        for place in ("step 1", "step 2"):
            store.at(place).transaction().make()
            with open_below(store, place) as below:
                below.create("data", [place.encode()], len(place))
        store.create("data", [b""], 0)
        _require(sorted(store.names()) == ["data", "step 1", "step 2"], "a name is missing")
        _require(sorted(store.places()) == ["step 1", "step 2"], "a place is missing")
        found = store.find("step 1/data")
        _require(found is not None and found.size == len("step 1"), "what lies below is not found")
        for prefix, names in (("", 3), ("step", 2), ("step 1/", 1), ("step 1/data", 1), ("none", 0)):
            _require(len(list(store.list(prefix))) == names, f"the listing of {prefix!r} is wrong")
        second = store.at("step 2")
        second.remove("")
        _require(sorted(store.places()) == ["step 1", "step 2"], "a place goes that is not empty")
        with open_below(store, "step 2") as below:
            below.remove("data")
        second.remove("")
        second.remove("")
        # A server of buckets may list a folder that it keeps by itself.
        is_gone = store.places() == ["step 1"] or (store.asks_by_request and not list(store.list("step 2/")))
        _require(is_gone, "an empty place stays")
        try:
            _require(not open_below(store, "nothing").names(), "a place that is not there has names")
        except OSError:
            return  # this store can tell

    def test_an_attempt_becomes_the_document(self) -> None:
        """The marker is there until the commit, which makes the document what was prepared."""
        store = self.make_store()
        for content in (b"first 1", b"second 2"):
            transaction = store.transaction("document")
            transaction.begin("marker", _version(store, "document"))
            _require("marker" in store.names(), "the marker is not there")
            _require(not transaction.committed(), "it is committed too early")
            _require(transaction.commit(content) is Outcome.DONE and transaction.committed(), "the commit is lost")
            store.flush()
            transaction.close()
            _require_content(store, "document", content)
            _require(_names(store) == ["document"], "a marker stays")

    def test_an_attempt_is_aborted(self) -> None:
        """What is aborted changes nothing."""
        store, transaction = self._begin()
        transaction.abort()
        _require(not transaction.committed() and not _names(store), "something stays")

    def test_an_attempt_meets_a_document(self) -> None:
        """What was committed since the attempt began is not replaced by it."""
        store, transaction = self._begin()
        store.replace("document", b"another 1", None)
        outcome = transaction.commit(b"mine 2")
        _require(outcome is Outcome.LOST and not transaction.committed(), "it replaces what it has not seen")
        transaction.abort()
        _require_content(store, "document", b"another 1")
        _require(store.names() == ["document"], "a marker stays")

    def test_one_of_two_savers_wins(self) -> None:
        """A second saver is kept out, or one of the two attempts is lost."""
        store = self.make_store()
        store.replace("document", b"base 0")
        other = self.open_again(store)
        first, second = store.transaction("document"), other.transaction("document")
        _require(first.lock(), "nobody else is there")
        savers = [first, second] if other is store or second.lock() else [first]
        for number, one in enumerate(savers):
            one.begin(f"marker {number}", _version(store, "document"))
        outcomes = [one.commit(secrets.token_bytes(8)) for one in savers]
        for one in (first, second):
            one.close()
        _require(outcomes.count(Outcome.DONE) == 1, "not exactly one saver has won")
        _require(second.lock(), "the lock is not given back")
        second.close()

    def test_the_living_are_not_swept(self) -> None:
        """As long as an attempt may commit, nothing of it is removed; once it cannot, all of it is."""
        store, transaction = self._begin()
        store.create("data", [b"x"], 1)
        other = self.open_again(store).transaction("document")
        _require(other.sweep("marker", ["data"]) is not Held.NO, "a living attempt is swept")
        _require(sorted(_names(store)) == ["data", "marker"], "something of a living attempt is gone")
        transaction.close()
        store.replace("document", _ANOTHER, None)
        _require(other.sweep("marker", ["data"]) is Held.NO, "a dead attempt is kept")
        _require(store.names() == ["document"], "something of a dead attempt stays")

    def test_a_document_is_deleted(self) -> None:
        """It has another name from then on, and can be saved anew."""
        store = self.make_store()
        store.replace("document", b"old 1")
        outcome = store.transaction("document").delete(_version(store, "document"), "tombstone")
        _require(outcome is Outcome.DONE, "it is refused")
        _require_content(store, "document", None)
        _require(_content(store, "tombstone") in {b"old 1", None}, "something else has its new name")
        _require(store.replace("document", b"new 2", None) is Outcome.DONE, "the name is not free")

    def test_of_a_tombstone_one_version_is_removed(self) -> None:
        """Another one stays; the store may keep this one too, for as long as a late request could bring one back."""
        store = self.make_store()
        transaction = store.transaction("document")
        store.replace("document", encode_tombstone([]))
        old = store.find("document")
        store.replace("document", new := encode_tombstone([]))
        found = store.find("document")
        if old is None or found is None:
            raise AssertionError("a document is not found")
        _require(not transaction.delete_tombstone(old), "another version is removed")
        left = store.read("document")
        _require_same(left and left.data, new)
        if transaction.delete_tombstone(found):
            _require(store.find("document") is None, "a document stays")


def _version(store: Store, name: str) -> object:
    found = store.read(name)
    return found and found.version


def _content(store: Store, name: str) -> bytes | None:
    """Return the content of a name; None also of a tombstone, which stands for nothing."""
    found = store.read(name)
    return None if found is None or is_tombstone(found.data) else found.data


def _names(store: Store) -> list[str]:
    return [name for name in store.names() if _content(store, name) is not None]


def _require(held: bool, broken: str) -> None:
    if not held:
        raise AssertionError(f"the store breaks its contract: {broken}")


def _require_refused(call: Callable[[], object], kind: type[BaseException]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"the store accepts what it has to refuse with {kind.__name__}")


def _require_content(store: Store, name: str, wanted: bytes | None) -> None:
    _require_same(_content(store, name), wanted)


def _require_same(found: bytes | None, wanted: bytes | None) -> None:
    if found != wanted:
        raise AssertionError(f"the store holds {found!r:.80}, not {wanted!r:.80}")
