"""The recipes of docs/guides/recipes.md run as they stand there, with the real packages: ``python3 dev.py recipes``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import treering as tr
from tests.docs import hub

pytestmark = pytest.mark.recipes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")
TITLES = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)

# What the function of a recipe does when a program is killed before it was noted that it had returned.
TWICE = """
commits = []
with tr.Run("again", on_commit=lambda commit: ({0}(commit), {0}(commit), commits.append(commit))) as run:
    run.save(7, {{"w": jnp.ones(4)}}, metrics={{"loss": 0.3}})
(commit,) = commits     # no call of the two raised
"""
ONCE_MORE = """
with tr.Run("later", on_commit={0}) as run:
    run.save(7, {{"w": jnp.ones(4)}}, metrics={{"loss": 0.3}}).result()
    run.wait()
    run.save(8, {{"w": jnp.ones(4)}}, metrics={{"loss": 0.2}})
"""


def fences(title: str) -> list[str]:
    """The parts of the program of a section."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def run(folder: Path, *parts: str, **environment: str) -> str:
    """Run a program in a folder; return what it wrote on both streams."""
    at_home = {"HOME": str(folder), "TRACKIO_DIR": str(folder / "trackio"), "WANDB_ERROR_REPORTING": "false"}
    quiet = {"DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_DISABLE_TELEMETRY": "1"}
    paths = {"PYTHONPATH": f"{ROOT / 'src'}", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **at_home, **quiet, **paths, **environment}
    log = "import logging\nlogging.getLogger('treering').addHandler(logging.StreamHandler())\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", log + "".join(parts)], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_mlflow_knows_each_save_once(tmp_path: Path) -> None:
    counts = """
found = client.search_logged_models([experiment], filter_string=f"tags.digest = '{commit.digest}'")
assert [model.name for model in found] == ["step_00000007"]
assert [point.value for point in client.get_metric_history(job, "loss") if point.step == 7] == [0.3]
"""
    assert "on_commit failed" not in run(tmp_path, *fences("MLflow"), TWICE.format("track"), counts)
    assert (tmp_path / "mlflow.db").stat().st_size > 0


def test_wandb_writes_each_step_without_a_network(tmp_path: Path) -> None:
    program = "".join(fences("Weights & Biases")).replace("job.finish()", TWICE.format("track") + "job.finish()")
    # Nobody answers there.
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    assert "on_commit failed" not in run(tmp_path, program, **nowhere)
    (log,) = tmp_path.glob("wandb/offline-run-*/run-digits-1.wandb")
    written = log.read_bytes()
    for step in tr.Run(tmp_path / "tracked").steps():
        assert (tmp_path / "tracked" / f"step_{step:08}").as_uri().encode() in written
    assert (tmp_path / "again" / "step_00000007").as_uri().encode() in written


def test_trackio_writes_each_step_into_its_database(tmp_path: Path) -> None:
    program = "".join(fences("trackio")).replace("job.finish()", TWICE.format("track") + "job.finish()")
    reads = """
import json, os, sqlite3
(database,) = [name for name in os.listdir("trackio") if name.endswith(".db")]
rows = sqlite3.connect(f"trackio/{database}").execute("select step, metrics from metrics order by step").fetchall()
rows = [(step, json.loads(metrics)) for step, metrics in rows]
assert [(step, row["loss"]) for step, row in rows] == [(1, 0.9), (2, 0.4), (3, 0.6), (7, 0.3), (7, 0.3)], rows
assert len({row["digest"] for step, row in rows}) == 4
assert [row["path"] for step, row in rows][:3] == [os.path.abspath(f"tracked/step_{step:08}") for step in (1, 2, 3)]
"""
    assert "on_commit failed" not in run(tmp_path, program, reads)


# Where hf_xet is, small files come inside a commit; without it large ones come by LFS.
@pytest.mark.parametrize("kind", ["in the commit", "by LFS"])
def test_the_hub_has_each_step_once(tmp_path: Path, kind: str) -> None:
    largest, xet = (5 << 20, "0") if kind == "in the commit" else (1, "1")
    with hub.serving(largest_regular=largest) as server:
        environment = {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": xet, "HF_TOKEN": "hf_of_nobody"}
        written = run(tmp_path, *fences("Hugging Face Hub"), TWICE.format("upload"), **environment)
    assert "on_commit failed" not in written
    assert [commit["summary"] for commit in server.commits] == [
        "Step 1: {'loss': 0.9}", "Step 2: {'loss': 0.4}", "Step 7: {'loss': 0.3}",
    ]  # fmt: skip
    assert len({commit["description"] for commit in server.commits}) == 3
    assert bool(server.large) == (kind == "by LFS")
    newest = tmp_path / "published" / "step_00000002"
    assert {name: data for name, data in server.files.items() if name.startswith("step_00000002/")} == {
        f"step_00000002/{file.name}": file.read_bytes() for file in newest.iterdir()
    }


def test_a_hub_that_refuses_gets_the_step_after_the_next_save(tmp_path: Path) -> None:
    with hub.serving(refused="step_00000007") as server:
        environment = {"HF_ENDPOINT": server.url, "HF_TOKEN": "hf_of_nobody"}
        written = run(tmp_path, fences("Hugging Face Hub")[0], ONCE_MORE.format("upload"), **environment)
    assert "on_commit failed for step 7" in written
    assert {name.split("/")[0] for name in server.files} >= {"step_00000007", "step_00000008"}


def test_a_step_in_a_bucket_is_uploaded_from_a_copy(tmp_path: Path) -> None:
    copies = """
import dataclasses, pathlib
def upload_copy(commit):
    copy = pathlib.Path(commit.digest.replace(":", "-"), commit.path.name)
    if not (copy / "treering.json").exists():
        tr.convert(commit.path, copy)
    upload(dataclasses.replace(commit, path=copy))
with tr.Run("memory://somewhere/run", on_commit=lambda commit: (upload_copy(commit), upload_copy(commit))) as run:
    run.save(7, {"w": jnp.ones(4)}, metrics={"loss": 0.3})
"""
    with hub.serving() as server:
        environment = {"HF_ENDPOINT": server.url, "HF_TOKEN": "hf_of_nobody"}
        written = run(tmp_path, fences("Hugging Face Hub")[0], copies, **environment)
    assert "on_commit failed" not in written
    assert [commit["summary"] for commit in server.commits][2:] == ["Step 7: {'loss': 0.3}"]
    (copy,) = tmp_path.glob("xxh3-128-*/step_00000007")
    assert {name: data for name, data in server.files.items() if name.startswith("step_00000007/")} == {
        f"step_00000007/{file.name}": file.read_bytes() for file in copy.iterdir()
    }
    assert tr.load(copy)["w"][0] == 1


def test_a_signature_holds_until_a_byte_is_flipped(tmp_path: Path) -> None:
    again = TWICE.format("sign") + "assert load_signed('again/step_00000007')['w'][0] == 1\n"
    attacks = """
def refused(step):
    try:
        load_signed(step)
    except Exception as error:
        return True
    return False

for file in list(commit.path.iterdir()):        # the index too, and a file more
    kept = file.read_bytes()
    file.write_bytes(kept[:50] + bytes([kept[50] ^ 1]) + kept[51:])
    assert refused(commit.path), file
    file.write_bytes(kept)
    assert not refused(commit.path), file
(commit.path / "notes.txt").write_text("mine")
assert refused(commit.path)
(commit.path / "notes.txt").unlink()
assert not refused(commit.path)
import pathlib
pathlib.Path("key.pub").write_bytes(
    ec.generate_private_key(ec.SECP256R1()).public_key().public_bytes(*text)
)
checking = model_signing.verifying.Config().use_elliptic_key_verifier(public_key="key.pub")
assert refused(commit.path)
"""
    assert "on_commit failed" not in run(tmp_path, *fences("OpenSSF model signing"), again, attacks)
    signed = tmp_path / "signed"
    assert tr.Run(signed).steps() == [3, 4]
    assert {path.name for path in signed.glob("*.sig")} >= {"step_00000003.sig", "step_00000004.sig"}
    assert tr.verify(tmp_path / "again").ok  # a signature beside a step is no business of the run's


def test_incremental_steps_are_signed_with_the_files_that_they_share(tmp_path: Path) -> None:
    program = fences("OpenSSF model signing")[0].replace("on_commit=sign", "on_commit=sign, incremental=True")
    check = "".join(fences("OpenSSF model signing")[1]).split("assert load_signed")[0]
    loads = "assert [load_signed(f'signed/step_{step:08}')['w'][0] for step in (3, 4)] == [3, 4]\n"
    assert "on_commit failed" not in run(tmp_path, program, check, loads)


def test_every_section_of_the_page_is_run() -> None:
    assert [title for title in TITLES if f'"{title}"' not in Path(__file__).read_text(encoding="utf-8")] == []
