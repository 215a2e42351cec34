"""What importing costs, what it brings along, and that every public name is really there."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import imported_by

SOURCE = Path(__file__).parents[1] / "src"
PUBLIC = (
    "treering",
    "treering.errors",
    "treering.cadence",
    "treering.formats",
    "treering.leaves",
    "treering.retention",
    "treering.rules",
    "treering.run",
    "treering.serialization",
    "treering.testing",
    "treering.tree",
)
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if path.name != "__main__.py"
)
HEAVY = {"jax", "jaxlib", "numpy", "ml_dtypes", "flax", "msgpack", "click", "rich", "importlib.metadata"}


def fresh(program: str, *arguments: str) -> dict[str, object]:
    """Run a program in a new interpreter; return the JSON object on its last line."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_importing_treering_costs_next_to_nothing() -> None:
    program = """
import json, sys, time
start = time.process_time()
import treering
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules)}))
"""
    answers = [fresh(program) for _ in range(5)]
    assert not HEAVY & set(answers[0]["modules"])  # type: ignore[call-overload]
    # Of CPU, and the best of five: a busy machine makes some of them slow, and a slow import all of them.
    assert min(answer["seconds"] for answer in answers) < 0.050  # type: ignore[type-var, operator]


def test_the_door_to_runs_imports_no_jax() -> None:
    program = "import json, sys, treering.run; print(json.dumps({'modules': sorted(sys.modules)}))"
    assert not {"jax", "jaxlib", "numpy", "ml_dtypes"} & set(fresh(program)["modules"])  # type: ignore[call-overload]


def test_the_serialization_module_imports_nothing_of_checkpoints() -> None:
    program = "import json, sys, treering.serialization; print(json.dumps({'modules': sorted(sys.modules)}))"
    rooms = ("_checkpoint", "_coordination", "_background", "_leaves", "_runs")
    modules: list[str] = fresh(program)["modules"]  # type: ignore[assignment]
    assert [name for name in modules if name.startswith(tuple(f"treering.{room}." for room in rooms))] == []


@pytest.mark.parametrize("arguments", [["inspect", "FILE"], ["inspect", "FILE", "--json"], ["--help"], ["--version"]])
def test_header_verbs_start_without_jax_and_numpy(arguments: list[str], tmp_path: Path) -> None:
    file = tmp_path / "state.msgpack"
    file.write_bytes(b"\x81\xa1a\x01")
    imported = imported_by(*[str(file) if argument == "FILE" else argument for argument in arguments])
    assert not {"jax", "jaxlib", "numpy", "ml_dtypes", "flax"} & imported


def test_treering_does_not_import_flax() -> None:
    program = f"""
import importlib, json, sys
for name in {PUBLIC!r}:
    importlib.import_module(name)
print(json.dumps({{"modules": sorted(sys.modules)}}))
"""
    peers = {"flax", "optax", "equinox", "chex", "orbax", "safetensors", "tensorstore"}
    assert not peers & set(fresh(program)["modules"])  # type: ignore[call-overload]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_modules_say_what_is_public(name: str) -> None:
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    assert set(module.__all__) <= set(dir(module))
    for public in module.__all__:
        thing = getattr(module, public)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert inspect.getdoc(thing), f"{name}.{public} has no docstring"


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_show_an_example(name: str) -> None:
    module = importlib.import_module(name)
    functions = [getattr(module, public) for public in module.__all__]
    without = [f.__name__ for f in functions if inspect.isfunction(f) and ">>> " not in (f.__doc__ or "")]
    assert without == []


def test_unknown_names_are_attribute_errors() -> None:
    import treering

    with pytest.raises(AttributeError, match="no_such_name"):
        treering.no_such_name  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", ["formats", "testing"])
def test_modules_that_import_much_are_named_where_they_are_asked_for(name: str) -> None:
    asked = f"""
try: treering.{name}
except AttributeError as error: print(error)
import treering.{name}
treering.{name}"""
    out = subprocess.run([sys.executable, "-c", f"import treering{asked}"], capture_output=True, text=True, check=True)
    assert out.stdout == f"treering.{name} is imported by name: import treering.{name}\n"


def test_modules_and_functions_stay_short() -> None:
    lines: dict[str, int] = {}
    too_long: list[str] = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(SOURCE))
        lines[name] = text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 60:
                    too_long.append(f"{name}:{node.lineno} {node.name}: {length} lines")
    assert too_long == []
    assert [f"{name}: {count} lines" for name, count in lines.items() if count > 900] == []
    assert sorted(lines.values())[len(lines) // 2] <= 320


def test_no_module_subscripts_the_class_array_while_it_is_imported() -> None:
    """Python 3.11 knows ``array.array[int]`` in annotations alone, which nobody evaluates."""
    found: list[str] = []
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        notes = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
        unread = {id(inner) for note in notes if note is not None for inner in ast.walk(note)}
        found += [
            f"{path.relative_to(SOURCE)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and id(node) not in unread
            and ast.unparse(node) in {"array[int]", "array[float]"}
        ]  # fmt: skip
    assert found == []
