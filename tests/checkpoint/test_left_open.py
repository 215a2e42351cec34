"""Programs that end with a checkpoint open: nothing is said of it, wherever it is kept and however they end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treering
from tests.warm import Programs
from treering.leaves import tree_serialize_leaves

FORMS = ("ckpt", "tree.safetensors", "tree.msgpack", "leaves", "run")

PROGRAM = """
import builtins, sys, threading, types
import treering

def kept(path):
    one = treering.open(path)
    one["w"][::7]
    yield one

class Node:
    pass

module = sys.modules["kept"] = types.ModuleType("kept")
everything = []
for number, path in enumerate(sys.argv[1:]):
    opened = [treering.open(path) for _ in range(8)]
    views = opened[0]["w"], iter(opened[0])
    globals()[f"first{number}"] = opened.pop()
    for place in (builtins, treering, module, threading.current_thread()):
        setattr(place, f"kept{number}", opened.pop())
    node = Node()
    node.self, node.kept = node, opened.pop()
    generator = kept(path)
    setattr(module, f"more{number}", (node, next(generator), generator))
    everything += opened
module.at_end = lambda: everything
"""

ENDS = {
    "end": ("", 0, []),
    "exit": ("sys.exit(3)", 3, []),
    "exception": ("raise ValueError('of the program')", 1, ["ValueError: of the program"]),
    "inside": ("with treering.open(sys.argv[1]) as inner: sys.exit(4)", 4, []),
    "a thread": ("threading.Thread(target=lambda: module.at_end()[0]['w'][3:5]).start()", 0, []),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("left")
    tree = {"w": np.ones((300, 300))}
    for form in ("ckpt", "tree.safetensors", "tree.msgpack"):
        treering.save(folder / form, tree)
    tree_serialize_leaves(folder / "leaves", tree)
    with treering.Run(folder / "run") as run:
        run.save(1, tree)
    return folder


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_said(folder: Path, end: str, programs: Programs) -> None:
    line, status, wanted = ENDS[end]
    done = programs.run("-c", PROGRAM + line, *(str(folder / form) for form in FORMS))
    assert done.returncode == status, done.stderr
    assert done.stderr.splitlines()[-1:] == wanted
    assert "Exception ignored" not in done.stderr
