"""Worker of `test_parts`: processes that save parts together, with casts, and load what lies over each other."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import treering as tr
from tests.multiprocess.trees import placed, spread
from tests.multiprocess.trips import Cases

_GENEROUS = 60.0


def _whole(number: float) -> dict[str, Any]:
    """Return a tree whose arrays lie over all processes, but for what each holds by itself."""
    rows = spread("line rows", jax.devices(), 2)
    items = np.arange(64 * 48, dtype=np.float32).reshape(64, 48) + number
    return {
        "base": {"w": placed(items, rows), "b": np.full(3, number)},
        "lora": {"a": placed(items[:, :8] / 3, rows), "b": np.full(5, number / 3)},
        "step": int(number),
    }


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _refused(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return _said(error)
    return ""


def _is_like(found: Any, wanted: Any) -> list[str]:
    """Return what of the shards that lie here is other than wanted."""
    bad = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        other = wanted
        for part in path:
            other = other[part.key]
        shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else ()
        mine = {str(shard.index): np.asarray(shard.data).astype(np.float32) for shard in shards}
        theirs = other.addressable_shards if isinstance(other, jax.Array) else ()
        items = {str(shard.index): np.asarray(shard.data).astype(np.float32) for shard in theirs}
        bad += [f"{path}: other items" for place in items if not np.array_equal(mine[place], items[place])]
        if not isinstance(leaf, jax.Array) and not np.array_equal(leaf, other):
            bad.append(f"{path}: {leaf}, not {other}")
    return bad


def saves_and_loads(folder: str) -> dict[str, Any]:
    """Save a base and parts, now and in the background, and load them over each other in several ways."""
    cases, process = Cases(), jax.process_index()
    one, two = _whole(1), _whole(2)
    tr.save(f"{folder}/base", one, timeout=_GENEROUS)
    tr.save(f"{folder}/lora", two, only="lora", dtype="bfloat16", timeout=_GENEROUS)
    tr.save_async(
        f"{folder}/later", two, only=["lora", "step"], dtype={"lora/a": "float16"}, timeout=_GENEROUS
    ).result()
    both = [f"{folder}/base", f"{folder}/lora"]
    cast = two["lora"] | {"a": two["lora"]["a"].astype("bfloat16"), "b": two["lora"]["b"].astype("bfloat16")}
    wanted = one | {"lora": cast}
    with cases.case("over each other"):
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x,
            wanted,
        )
        cases.look("over each other", _is_like(tr.load(both, like, timeout=_GENEROUS), wanted))
    with cases.case("other places"):
        columns = spread("line columns", jax.devices(), 2)
        found: Any = tr.load(
            both, shardings=lambda key, aval: columns if key.endswith(("w", "a")) else None, timeout=_GENEROUS
        )
        cases.look("other places", [] if found["lora"]["a"].sharding == columns else ["another sharding"])
    with cases.case("as saved"):
        asked: Any = {"base": ..., "lora": {"a": like["lora"]["a"], "b": ...}, "step": ...}
        found = tr.load([*both, f"{folder}/later"], asked, cast=True, timeout=_GENEROUS)
        cases.look("as saved", [] if found["step"] == 2 else [f"step {found['step']}"])
    with cases.case("a run"), tr.Run(f"{folder}/run", timeout=_GENEROUS) as run:
        run.save(5, two, only="lora", dtype="bfloat16")
        run.wait()
        cases.look("a run", [] if list(run.load(5)) == ["lora"] else ["another part"])
    with cases.case("in the background"):
        cases.look("in the background", [] if tr.load_async(both).result()["step"] == 1 else ["another step"])
    with cases.case("opened"), tr.open(both) as opened:
        parts = opened["base/w"][process : process + 2], opened["lora/b"][...]
        said = [opened.origin("base/w"), opened.origin("lora/a")]
        whole = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)[process : process + 2] + 1
        found = said == both and np.array_equal(parts[0], whole)
        cases.look("opened", [] if found and parts[1].shape == (5,) else [f"{said}, {parts}"])
    with cases.case("abstract"):
        shapes: Any = tr.abstract(both)
        found = [
            (shapes[name][leaf].shape, str(shapes[name][leaf].dtype)) for name, leaf in (("base", "w"), ("lora", "a"))
        ]
        cases.look("abstract", [] if found == [((64, 48), "float32"), ((64, 8), "bfloat16")] else [str(found)])
        placed_there = tr.load(both, shapes, timeout=_GENEROUS)
        cases.look("abstract", [] if placed_there["step"] == 1 else ["another step"])
    with cases.case("converted"):
        own = f"{folder}/converted {process}"
        tr.convert(both, own)
        cases.look("converted", [] if tr.load(own)["step"] == 1 and tr.verify(own).ok else ["another tree"])
    refused = {
        "converted": _refused(lambda: tr.convert(both, f"{folder}/together")),
        "background": _refused(lambda: tr.load_async(both, like)),
        "function": _refused(
            lambda: tr.load_async(f"{folder}/base", only="base/w", shardings=lambda key, aval: columns).result()
        ),
        "other globs": _refused(
            lambda: tr.save(f"{folder}/no", one, only="lora" if process else "base", timeout=_GENEROUS)
        ),
        "no match": _refused(
            lambda: tr.save(f"{folder}/no", one, only="nothing" if process else "base", timeout=_GENEROUS)
        ),
        "other dtypes": _refused(
            lambda: tr.save(f"{folder}/no", one, dtype="bfloat16" if process else "float16", timeout=_GENEROUS)
        ),
        "too large": _refused(
            lambda: tr.save(f"{folder}/no", {"w": one["base"]["w"] * 1e30}, dtype="float16", timeout=_GENEROUS)
        ),
    }
    return {"count": cases.count, "bad": cases.bad, "refused": refused}
