"""Configuration of Sphinx, which builds the pages and the reference of the public modules."""

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from building import fences, links, notebooks, pages, published, reference, sidebar, twins  # noqa: E402
from sphinx.util import logging  # noqa: E402

import treering  # noqa: E402

_log = logging.getLogger(__name__)

project = "treering"
author = "the treering authors"
copyright = author  # noqa: A001 - the name is Sphinx's
version = release = treering.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design", "sphinx_copybutton"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
nitpicky = True
smartquotes_action = "D"  # dashes alone: quotes stand around what a program says

html_theme = "shibuya"
html_title = "treering"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/treering.svg"
html_copy_source = False
html_domain_indices = False
templates_path = ["_templates"]
html_theme_options = {
    "accent_color": "jade",
    "light_logo": "_static/treering.svg",
    "dark_logo": "_static/treering.svg",
    "nav_links": [{"title": "the tabs of building/sidebar.py stand here"}],
    "show_ai_links": False,  # they lead to other sites
}

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
# The notebooks stand in the repository without what they print. The build runs them: a cell that fails is a warning,
# and warnings are errors. What they printed is kept for builds with the same treering.
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "notebooks" / notebooks.digest_of_source())
nb_execution_show_tb = True
nb_execution_in_temp = True
nb_execution_timeout = 120

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# With a network, TREERING_DOCS_ONLINE=1 makes links of the names of Python, numpy and jax. The usual build asks nobody,
# and links of other sites to ours need nothing of it: our objects.inv is always written.
if os.environ.get("TREERING_DOCS_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
    }

# Names in docstrings and signatures that have no page here; the build has no network access to look them up.
nitpick_ignore_regex = [
    (r"py:.*", r"(abc|builtins|collections|os|pathlib|re|typing|gzip)\..*"),
    (r"py:.*", r"[A-Z]\w*Error|object|str|int|bytes|bool|tuple|dict|list|None"),
    (r"py:.*", r"(jax|numpy|flax)\..*"),
    (r"py:.*", r"treering\..*\.T"),  # type variables of generic classes
    # Base classes.
    (r"py:class", r"treering\._store\.(api\.(Store|Closable)|objects\.store\.ObjectStore)"),
    (
        r"py:class",
        r"treering\.(_arrays\.host\.BoxedArray|_values\.outline\.InNotebook|testing\.formats\.FormatContract|rules\.(_Every|_AnyOf))",
    ),
]


def _before_reading(app: Any) -> None:  # noqa: ARG001
    reference.write_pages()
    pages.every_page.cache_clear()
    sidebar.groups.cache_clear()


def _outdated(app: Any, env: Any, added: Any, changed: Any, removed: Any) -> list[str]:  # noqa: ARG001
    """Read the pages again that are made of others."""
    return [name for name in env.found_docs if name.endswith("index") or name in {"reference/api", "reference/verbs"}]


def _on_source(app: Any, name: str, source: list[str]) -> None:  # noqa: ARG001
    source[0] = fences.shown_text(name, source[0])


def _on_docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001, PLR0917
    """Make links of the pages that a docstring names: ``docs/guides/runs.md``."""
    lines[:] = [re.sub(r"``docs/([\w/-]+)\.md``", r":doc:`/\1`", line) for line in lines]


def _on_page(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:  # noqa: ARG001
    """Give each page its description, its twin, the tabs and the list beside it."""
    page = pages.every_page().get(name)
    said = page.description if page else f"{context.get('title', 'A page')} of the documentation of treering."
    if 'name="description"' not in context.get("metatags", ""):
        context["metatags"] = context.get("metatags", "") + pages.meta(said)
    context["tabs"] = sidebar.tabs(name)
    context["twin"] = f"{posixpath.basename(name)}.md" if page else None
    context["toctree"] = lambda **_: sidebar.sidebar(name, context["pathto"])


def _after_building(app: Any, failed: Exception | None) -> None:
    if failed is not None or app.builder.name != "html":
        return
    folder = Path(app.outdir)
    published.write_redirects(folder)
    twins.write_twins(folder)
    built = {"genindex.html", "search.html", *published.published(), *(f"{name}.html" for name in app.env.found_docs)}
    for dead in links.dead_links(folder, built):
        _log.warning("a link leads nowhere: %s", dead)


def setup(app: Any) -> None:
    """Let the pages of this site be made."""
    app.connect("builder-inited", _before_reading, priority=100)
    app.connect("env-get-outdated", _outdated)
    app.connect("source-read", _on_source)
    app.connect("autodoc-process-docstring", _on_docstring)
    app.connect("html-page-context", _on_page)
    app.connect("build-finished", _after_building)
