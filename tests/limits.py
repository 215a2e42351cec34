"""Sizes and times from which treering does things in another way, lowered so that small inputs reach them.

This is the one place of the tests that knows where these constants are. A constant that moved fails here by its name.
"""

import dataclasses
import importlib
from typing import Any

import pytest

_LIMITS = {
    # state dicts and their msgpack
    "chunk_of_state_dicts": "treering.serialization.MAX_CHUNK_SIZE",
    "chunk_of_flax_files": "treering._checkpoint.save_msgpack.CHUNK_BYTES",
    "window_of_msgpack": "treering._foreign.msgpack_source._WINDOW_BYTES",
    "bits_of_nonces": "treering._codec.msgpack.write.ENOUGH",
    # reads and writes of arrays
    "small_read": "treering._arrays.incoming._SMALL_BYTES",
    "far_group": "treering._arrays.incoming._FAR_GROUP_BYTES",
    "slab": "treering._arrays.incoming._SLAB_BYTES",
    "shared_memory": "treering._arrays.incoming._ROOM_BYTES",
    "slab_of_maps": "treering._arrays.derived_source._SLAB_BYTES",
    "delivered_batch": "treering._arrays.delivered.BATCH_BYTES",
    "converted_piece": "treering._arrays.source_arrays._PIECE_BYTES",
    "exchanged_together": "treering._arrays.exchange._TOGETHER",
    "data_file": "treering._arrays.outgoing.FILE_BYTES",
    "other_writers": "treering._arrays.host.OTHER_WRITERS",
    "compared_box": "treering._plan.increment.BOX_BYTES",
    "compared_at_once": "treering._checkpoint.compare.SMALLEST_BLOCK",
    "compared_meanwhile_from": "treering._checkpoint.compare._MEANWHILE_FROM",
    "copied_piece": "treering._checkpoint.copy_checkpoint._PIECE_BYTES",
    # joint loads
    "joint_batch": "treering._checkpoint.joint_load.BATCH_BYTES",
    "read_first": "treering._checkpoint.joint_load._READ_FIRST_BYTES",
    "shared_index_from": "treering._checkpoint.joint_load._SHARED_FROM",
    # leaves directories
    "chunks_held_open": "treering._leaves.chunks.files._MOST",
    "small_leaf": "treering._leaves.source._SMALL_BYTES",
    "careful_leaf": "treering._leaves.source._CAREFUL_BYTES",
    # foreign files
    "foreign_files_held_open": "treering._foreign.foreign_tree._MOST_OPEN",
    "large_npz_array": "treering._foreign.write_npz._LARGE",
    "many_npz_arrays": "treering._foreign.write_npz._MANY",
    "zstd_in_one_go": "treering._codec.compression._IN_ONE_GO",
    "zstd_whole": "treering._codec.compression._WHOLE",
    "zstd_window": "treering._codec.compression._WINDOW",
    # documents and messages
    "packed_index_from": "treering._format.document.PACKED_FROM",
    "largest_document": "treering._store.open_folder.LARGEST_DOCUMENT",
    "largest_message": "treering._coordination.message_board.LARGEST_MESSAGE",
    "largest_message_of_stores": "treering._store.api.LARGEST_MESSAGE",
    "superseded_attempts": "treering._codec.key_document.MOST_SUPERSEDED",
    "superseded_kept": "treering._store.waiting._MOST_KEPT",
    # the disk
    "past_the_cache_from": "treering._store.posix.writing.DIRECT_FROM",
    "free_share": "treering._store.posix.writing.FREE_SHARE",
    "run_of_writes": "treering._store.posix.writing._RUN_BYTES",
    "written_piece": "treering._store.posix.writing._PIECE_BYTES",
    "writing_threads": "treering._store.posix.writing.THREADS",
    "read_piece": "treering._store.posix.reading._PIECE_BYTES",
    "two_readers_from": "treering._store.posix.reading._TWO_THREADS_FROM",
    "table_of_mounts": "treering._store.posix.folder._MOUNTS",
    # buckets
    "whole_object": "treering._store.objects.store.WHOLE_BYTES",
    "first_read_of_objects": "treering._store.objects.reading.FIRST_BYTES",
    "longest_listing": "treering._store.objects.client._LONGEST_LISTING",
    "client_made_anew_after": "treering._store.objects.repetition._ANEW",
    "longest_pause": "treering._store.objects.repetition._LONGEST_PAUSE",
    "patience_with_web_servers": "treering._store.objects.https._PATIENCE",
    "seconds_of_web_reads": "treering._store.objects.https._SECONDS",
    "slowest_web_read": "treering._store.objects.https._SLOWEST",
    "metadata_server": "treering._store.objects.connect._METADATA",
    "seconds_of_metadata": "treering._store.objects.connect._SECONDS",
}


def lower(patch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Let limits of treering be these, by the names of the table above."""
    for name, limit in limits.items():
        patch.setattr(_LIMITS[name], limit)


def shorten(patch: pytest.MonkeyPatch, **seconds: Any) -> None:
    """Let treering wait only so long, by the names of `Timing`; for the rest as long as always."""
    timing = importlib.import_module("treering._values.timing")
    patch.setattr(timing, "current", dataclasses.replace(timing.current, **seconds))


def write_past_the_cache(patch: pytest.MonkeyPatch, *, above: int = 0, free_share: float = 0) -> None:
    """Let files of more bytes, which need more than a share of the free memory, go past the page cache."""
    lower(patch, past_the_cache_from=above, free_share=free_share)
