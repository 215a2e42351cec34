"""``treering convert`` and ``cp``: a checkpoint, a run or a file, saved in another form or copied as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from treering._checkpoint.forms import FORMS, LOSSES
from treering._cli.main import GOOD, note, write_lines
from treering._cli.verbs import describe, verb
from treering._inspect.inspect import list_steps
from treering._printable import hide_secrets, printable
from treering._values.human import near
from treering._view.progress import reporter, showing
from treering.errors import NotFoundError

if TYPE_CHECKING:
    from treering._keymap.key_map import KeyMap


@verb(
    "treering convert model.safetensors ckpt --map llama.toml",
    "treering convert ckpt params.safetensors --at params --dtype bfloat16",
    "treering convert ckpt model --to hf --at params --max-file-size 2GB",
    "treering convert ckpt item --to orbax",
    "treering convert ckpt state.msgpack --rename 'params/{k**}=model/{k**}'",
    "treering convert ckpt weights.npz --lose scalars --lose 'opt/**'",
    "treering convert orbax_run run",
    "treering convert run orbax_run --to orbax --item params=params --item state=opt",
)
@click.argument("sources", metavar="SRC...", type=click.Path(path_type=str), nargs=-1, required=True)
@click.argument("target", metavar="DST", type=click.Path(path_type=str))
@click.option("--to", metavar="FORM", help=f"The form of DST, {', '.join(FORMS)}; else its suffix says it.")
@click.option("--only", "globs", multiple=True, metavar="GLOB", help="Convert these leaves alone; may be repeated.")
@click.option("--at", metavar="KEY", help="Convert the subtree there as if it were the whole tree.")
@click.option("--map", "map_path", metavar="FILE", type=click.Path(path_type=str), help="A key map, a TOML file.")
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="OLD=NEW",
    help="Give leaves other keys, by patterns as in a key map; may be repeated.",
)
@click.option("--dtype", metavar="DTYPE", help="Cast all arrays of floats to this dtype.")
@click.option("--max-file-size", metavar="SIZE", help="How large a file of the form hf may be, such as 2GB.")
@click.option(
    "--lose",
    multiple=True,
    metavar="NAME",
    help=f"Accept that a kind of things is lost ({', '.join(LOSSES)}), or leaves by a glob; may be repeated.",
)
@click.option("--item", "items", multiple=True, metavar="NAME=KEY", help="An item of the form orbax, and its subtree.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint or a file that is there.")
def convert(
    sources: tuple[str, ...], target: str, *, to: str | None, globs: tuple[str, ...], at: str | None,
    map_path: str | None, renames: tuple[str, ...], dtype: str | None, max_file_size: str | None, lose: tuple[str, ...],
    items: tuple[str, ...], overwrite: bool,
) -> int:  # fmt: skip
    """Save SRC, a checkpoint or file of any form that treering reads, to DST in another form, and verify DST.

    A DST that ends in .safetensors, .msgpack or .npz becomes one such file, any other a folder: of treering, or of the
    form --to hf, leaves or orbax. If the form cannot hold something, that is listed, and nothing is written; --lose
    accepts it. Several SRC, such as a base and an adapter, lie over each other, and DST has the whole: of each leaf the
    last one counts.

    Of a run, or of the root of Orbax's CheckpointManager, every step becomes a step of the run DST, with its metrics,
    metadata and time; with --to orbax a step of a root that CheckpointManager reads, in one item, or in those that
    --item names: --item state=opt, and --item data=grain:data for the state of an iterator of grain, --item
    config=json:config for a member of the metadata. Called again after an interrupt, the verb goes on where it was.
    """
    from treering._checkpoint.convert import ConvertOptions, save_options
    from treering._runs.convert_run import convert_any

    key_map = _read_map(map_path, renames)
    if key_map is not None and renames:
        _require_matches(sources, key_map)
    options = ConvertOptions(
        to=to, only=list(globs) or None, at=at, key_map=key_map, dtype=dtype, lose=lose, items=_read_items(items)
    )
    save = save_options(target, to=to, overwrite=overwrite, progress=True, max_file_size=max_file_size)
    convert_any(sources, save, options)
    write_lines([printable(hide_secrets(f"{target}: {describe(target)}, from {' + '.join(sources)}"))])
    return GOOD


def _read_items(items: Sequence[str]) -> dict[str, str] | None:
    if odd := [item for item in items if "=" not in item]:
        raise click.UsageError(f"--item {odd[0]!r} is not NAME=KEY")
    found: dict[str, str] = {}
    for name, _, key in (item.partition("=") for item in items):
        if found.setdefault(name, key) != key:
            raise click.UsageError(f"--item names {name!r} twice")
    return found or None


def _read_map(path: str | None, renames: Sequence[str]) -> KeyMap | None:
    from treering._keymap.key_map import KeyMap
    from treering._keymap.key_rule import KeyRule

    if path is not None and renames:
        raise click.UsageError("--map and --rename exclude each other; the rules of a map can rename")
    if path is not None:
        return KeyMap.read(path)
    if odd := [rename for rename in renames if rename.count("=") != 1]:
        raise click.UsageError(f"--rename {odd[0]!r} is not OLD=NEW; a key map can have keys with '='")
    if not renames:
        return None
    return KeyMap([*(KeyRule(*rename.split("=")) for rename in renames), KeyRule("{k**}", "{k**}", rest=True)])


def _require_matches(sources: Sequence[str], key_map: KeyMap) -> None:
    """Refuse a rename that no leaf has the key for; the steps of a run have each their own.

    Raises:
        NotFoundError: one does nothing; and as ``detect``.
    """
    from treering._checkpoint.forms import list_headers
    from treering._view.rows import leaves_of

    if any(list_steps(source) is not None for source in sources):
        return
    keys = [key for source in sources for key, _ in leaves_of(list_headers(source).root)]
    for rule in key_map.rules:
        if not any(pattern.match(key) is not None for pattern in rule.sources for key in keys) and not rule.rest:
            old, new = rule.sources[0].text, rule.targets[0].text
            close = near(old, keys)
            hint = f"did you mean {close!r}?" if close else f"treering ls {sources[0]!r} lists all keys"
            if any(key.startswith(f"{old}/") for key in keys):
                hint = f"it is a branch; --rename '{old}/{{k**}}={new}/{{k**}}' renames all that lies below it"
            raise NotFoundError(f"--rename: no leaf matches {old!r}", hint=hint)


@verb(
    "treering cp runs/a s3://bucket/runs/a",
    "treering cp s3://bucket/runs/a/step_00001000 ckpt",
    "treering cp https://host/model.safetensors model.safetensors",
)
@click.argument("source", metavar="SRC", type=click.Path(path_type=str))
@click.argument("target", metavar="DST", type=click.Path(path_type=str))
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint, a step or a file that is there.")
def cp(source: str, target: str, *, overwrite: bool) -> int:
    """Copy SRC to DST: a checkpoint, a run step by step, or a single file, between disk, buckets and web servers.

    DST is the path of the copy itself. Every block is compared with its checksum on the way. The copy of a checkpoint
    is a save of its own: nothing is at DST before it is whole. A copy of a run that was interrupted goes on where it
    was.
    """
    from treering._runs.copy_run import copy_path

    told = reporter(True, "copying")
    with showing(told):
        copy_path(source, target, overwrite=overwrite, progress=told)
    write_lines([printable(hide_secrets(f"{target}: {describe(target)}, from {source}"))])
    if target.startswith("memory:"):
        note("memory:// is the memory of this process, and ends with it")
    return GOOD
