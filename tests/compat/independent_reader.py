"""A reader of checkpoints made from docs/spec/checkpoint.md alone: json, numpy and xxhash, nothing of treering.

``read(folder)`` returns the tree and the leaves by key. Arrays of dtypes that numpy lacks come as unsigned ints of the
same size; classes come as dicts of their fields.
"""

import base64
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

HEAD = re.compile(rb'\{"treering": [145], "digest": "')
DIGEST_CHARACTERS = len("xxh3-128:") + 32
ONE_BYTE = {"int1", "int2", "int4", "uint1", "uint2", "uint4"}


def digest(*parts: bytes) -> str:
    return "xxh3-128:" + xxhash.xxh3_128(b"".join(parts)).hexdigest()


def read_index(data: bytes) -> dict[str, Any]:
    head = HEAD.match(data)
    assert head, "not an index of version 1, 4 or 5"
    end = head.end() + DIGEST_CHARACTERS
    assert data[head.end() : end].decode() == digest(head[0], data[end:]), "the index is damaged"
    index = json.loads(data)
    return unpacked(index) if isinstance(index["structure"], dict) else index


def unpacked(index: dict[str, Any]) -> dict[str, Any]:
    """Turn an index with packed columns into what version 1 would say."""

    def numbers(node: Any, rows: int = 0) -> list[int]:
        text = isinstance(node, str)
        return np.frombuffer(base64.b64decode(node[3:]), f"<{node[:2]}").tolist() if text else [node] * rows

    types, chunks, nodes = numbers(index["leaves"]["type"]), index["chunks"], index["structure"]["containers"]
    if chunks["leaf"] is None:
        chunks["leaf"] = [leaf for leaf, of in enumerate(types) if "dtype" in index["types"][of]]
    rows = len(numbers(chunks["offset"]))
    lists = {name: numbers(chunks[name], rows) for name in ("file", "offset", "nbytes", "block", "box")}
    if isinstance(chunks["leaf"], int | str):
        lists["leaf"] = numbers(chunks["leaf"], rows)
    chunks |= lists | {"box": [chunks["boxes"][n] for n in lists["box"]]}
    tokens = numbers(index["structure"]["tokens"])
    index["structure"] = [nodes[n] if n < len(nodes) else n - len(nodes) + 1 for n in tokens]
    index["leaves"] = {"type": types, "key": build(index["structure"], types)[1]}
    return index


def numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        return np.dtype("<u2")
    if name in ONE_BYTE or name.startswith(("float4_", "float6_", "float8_")):
        return np.dtype("u1")
    return np.dtype(name).newbyteorder("<")


def check_files(folder: Path, index: dict[str, Any]) -> list[bytes]:
    """Read every data file; compare sizes, headers and blocks with the index."""
    table = base64.b64decode(index["checksums"]["table"])
    assert index["checksums"]["algorithm"] == "xxh3-64" and index["chunks"]["codec"] is None  # noqa: PT018
    chunks, at, sums = index["chunks"], 0, []
    for nbytes, block in zip(chunks["nbytes"], chunks["block"], strict=True):
        count = -(-nbytes // block)
        sums.append(table[at : at + 8 * count])
        at += 8 * count
    assert at == len(table)
    files = [(folder / file["name"]).read_bytes() for file in index["files"]]
    for number, (file, data) in enumerate(zip(index["files"], files, strict=True)):
        assert len(data) == file["nbytes"], "a data file is cut short or too long"
        mine = [n for n, found in enumerate(chunks["file"]) if found == number]
        mine.sort(key=lambda n: (chunks["offset"][n], chunks["nbytes"][n]))
        assert file["digest"] == digest(data[: file["header"]], *(sums[n] for n in mine)), "a header is damaged"
        assert struct.unpack("<Q", data[:8])[0] == file["header"] - 8
        json.loads(data[8 : file["header"]])  # a safetensors file like any other
        for n in mine:
            start, nbytes, block = chunks["offset"][n], chunks["nbytes"][n], chunks["block"][n]
            for k, place in enumerate(range(0, nbytes, block)):
                piece = data[start + place : start + min(place + block, nbytes)]
                assert sums[n][8 * k : 8 * k + 8] == struct.pack("<Q", xxhash.xxh3_64_intdigest(piece)), "damage"
    return files


def stored_arrays(index: dict[str, Any], files: list[bytes]) -> dict[int, np.ndarray]:
    """Put the chunks of each leaf together."""
    found: dict[int, np.ndarray] = {}
    chunks = index["chunks"]
    for n, leaf in enumerate(chunks["leaf"]):
        kind = index["types"][index["leaves"]["type"][leaf]]
        dtype = numpy_dtype(kind["dtype"])
        array = found.setdefault(leaf, np.zeros(kind["shape"], dtype))
        box = chunks["box"][n] or [[0, length] for length in kind["shape"]]
        data = files[chunks["file"][n]][chunks["offset"][n] :][: chunks["nbytes"][n]]
        part = np.frombuffer(data, dtype).reshape([stop - start for start, stop in box])
        array[tuple(slice(start, stop) for start, stop in box)] = part
    return found


def number(node: Any) -> float:
    if isinstance(node, str) and node.startswith("nan:"):
        return struct.unpack("<d", struct.pack("<Q", int(node[4:], 16)))[0]
    return float(node)


def text(node: Any) -> str:
    return node if isinstance(node, str) else base64.b64decode(node["base64"]).decode("utf-8", "surrogatepass")


def value(kind: str, node: Any) -> Any:
    """Return a Python leaf that lies in the index."""
    forms = {
        "int": lambda: int(node, 16) if isinstance(node, str) else node,
        "float": lambda: number(node),
        "complex": lambda: complex(*map(number, node)),
        "str": lambda: text(node),
        "bytes": lambda: base64.b64decode(node),
        "bytearray": lambda: bytearray(base64.b64decode(node)),
        "opaque": lambda: key(node),
    }
    return forms[kind]() if kind in forms else node  # None, True, False


def key(node: Any) -> Any:
    """Return a key of a dict, or a static value."""
    if isinstance(node, str) or "text" in node:
        return node if isinstance(node, str) else (node["class"], text(node["text"]))  # a class of the program's own
    ((form, content),) = node.items()
    forms: dict[str, Any] = {
        "int": lambda digits: int(digits, 0),
        "float": lambda digits: float.fromhex(digits) if "0x" in digits else number(digits),
        "bytes": base64.b64decode,
        "tuple": lambda items: tuple(map(key, items)),
        "base64": lambda _: text(node),
    }
    return forms[form](content) if form in forms else content  # None, True, False


def part(node: Any) -> str:
    """Return the text of a key as a part of a key text."""
    found = key(node)
    shown = found if isinstance(found, str) else text(node["text"]) if "text" in node else ascii(found)
    escaped = shown.replace("~", "~0").replace("/", "~1")
    return re.sub("[\ud800-\udfff]", lambda half: f"~u{ord(half[0]):04x}", escaped)


def build(tokens: list[Any], leaves: list[Any]) -> tuple[Any, list[str]]:
    """Put the containers around the leaves; return the key texts of these too."""
    keys: list[str] = []
    waiting = iter(leaves)
    stream = iter([each for token in tokens for each in ([token] if isinstance(token, dict) else [None] * token)])

    def child(*way: str) -> Any:
        node = next(stream)
        if node is None:
            keys.append("~" if way == ("",) else "/".join(way))
            return next(waiting)
        if node["node"] in ("list", "tuple"):
            items = [child(*way, str(n)) for n in range(node["length"])]
            return items if node["node"] == "list" else tuple(items)
        return {key(name): child(*way, part(name)) for name in node["keys" if "keys" in node else "fields"]}

    return child(), keys


def read(folder: Path) -> tuple[Any, dict[str, Any]]:
    index = read_index((folder / "treering.json").read_bytes())
    arrays = stored_arrays(index, check_files(folder, index))
    values, leaves = iter(index["values"]), []
    for leaf, of in enumerate(index["leaves"]["type"]):
        kind = index["types"][of]
        data = arrays[leaf] if "dtype" in kind else value(kind["kind"], next(values))
        if "dtype" in kind and kind["kind"] in ("str", "bytes", "bytearray"):
            into = {"str": lambda raw: raw.decode("utf-8", "surrogatepass"), "bytes": bytes, "bytearray": bytearray}
            data = into[kind["kind"]](data.tobytes())
        leaves.append(data)
    tree, keys = build(index["structure"], leaves)
    assert keys == index["leaves"]["key"]
    return tree, dict(zip(keys, leaves, strict=True))
