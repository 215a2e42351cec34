"""``treering convert``: a checkpoint or file of any form, saved in another one."""

from __future__ import annotations

import click

from treering._cli.options import verb
from treering._cli.terminal import GOOD


@verb(
    "treering convert model.safetensors ckpt --map llama.toml",
    "treering convert ckpt params.safetensors --at params --dtype bfloat16",
    "treering convert weights.npz ckpt",
)
@click.argument("source", metavar="SRC", type=click.Path(path_type=str))
@click.argument("target", metavar="DST", type=click.Path(path_type=str))
@click.option("--to", type=click.Choice(["treering", "safetensors"]), help="The form of DST; else its suffix says it.")
@click.option("--only", "globs", multiple=True, metavar="GLOB", help="Convert these leaves alone; may be repeated.")
@click.option("--at", metavar="KEY", help="Convert the subtree there as if it were the whole tree.")
@click.option("--map", "map_path", metavar="FILE", type=click.Path(path_type=str), help="A key map, a TOML file.")
@click.option("--dtype", metavar="DTYPE", help="Cast all arrays of floats to this dtype.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint or a file that is there.")
def convert(
    source: str, target: str, *, to: str | None, globs: tuple[str, ...], at: str | None, map_path: str | None,
    dtype: str | None, overwrite: bool,
) -> int:  # fmt: skip
    """Save SRC, a checkpoint or file of any form that treering reads, to DST in another form, and verify DST.

    A DST that ends in .safetensors becomes one such file, any other a folder of treering. If the form cannot hold some
    leaves, they are listed, and nothing is written.
    """
    from treering._checkpoint.convert import ConvertOptions, convert_path
    from treering._checkpoint.save_options import SaveOptions
    from treering._keymap.key_map import KeyMap
    from treering.errors import Exists

    key_map = None if map_path is None else KeyMap.read(map_path)
    options = ConvertOptions(to=to, only=list(globs) or None, at=at, key_map=key_map, dtype=dtype)
    try:
        save = SaveOptions.of(target, metadata=None, overwrite=overwrite, progress=True, processes="this", timeout=None)
        convert_path(source, save, options)
    except Exists as error:
        error.hint = error.hint and error.hint.replace("overwrite=True", "--overwrite")
        raise
    return GOOD
