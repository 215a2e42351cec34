"""Configurations of compressors: what TensorStore takes, and what it makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tensorstore

from treering._codec.compressors import require_known_compressor
from treering._codec.zarr import ZarrArray, zarray_bytes
from treering.errors import Unsupported

CONFIGS: list[dict[str, Any]] = [
    {"id": "zstd"},
    {"id": "blosc"},
    {"id": "blosc", "cname": "zstd", "clevel": 9, "shuffle": 0, "blocksize": 256},
    {"id": "blosc", "cname": "nonsense"},
    {"id": "lz4"},
    {"id": "lzma", "preset": 1},
    {"id": "nonsense"},
    *({"id": codec, "more": 1} for codec in ("zstd", "gzip", "zlib", "bz2")),
    *({"id": codec, "level": "1"} for codec in ("zstd", "gzip", "zlib", "bz2")),
    *(
        {"id": codec, "level": level}
        for codec in ("zstd", "gzip", "zlib", "bz2")
        for level in (-131073, -131072, -1, 0, 1, 9, 10, 22, 23)
    ),
    *({"id": codec} for codec in ("gzip", "zlib", "bz2")),
]


@pytest.mark.parametrize("config", CONFIGS, ids=json.dumps)
def test_tensorstore_agrees(config: dict[str, Any]) -> None:
    array = ZarrArray(shape=(4,), chunks=(4,), dtype="uint8")
    metadata = json.loads(zarray_bytes(array)) | {"compressor": config}
    spec = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata}
    try:
        store: Any = tensorstore.open(spec, create=True, context=tensorstore.Context()).result()
    except ValueError:
        with pytest.raises(Unsupported, match=config["id"]):
            require_known_compressor(config)
    else:
        assert json.loads(require_known_compressor(config)) == json.loads(store.kvstore[".zarray"])["compressor"]
        assert require_known_compressor(json.loads(require_known_compressor(config))) == require_known_compressor(
            config
        )


def test_levels_are_whole_numbers() -> None:
    for level in (True, 1.0, None):
        with pytest.raises(Unsupported, match="level"):
            require_known_compressor({"id": "zstd", "level": level})


def test_the_message_is_short() -> None:
    with pytest.raises(Unsupported) as caught:
        require_known_compressor({"id": "nonsense"})
    assert str(caught.value) == (
        'the compressor {"id":"nonsense"} is unknown to TensorStore: "nonsense" is not registered'
    )
