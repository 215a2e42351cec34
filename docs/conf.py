"""Configuration of Sphinx, which builds the pages and the reference of the public modules."""

import treering

project = "treering"
author = "the treering authors"
copyright = author  # noqa: A001 - the name is Sphinx's
version = release = treering.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Names in docstrings and signatures that have no page here; the build has no network access to look them up.
nitpick_ignore_regex = [
    (r"py:.*", r"(abc|builtins|collections|os|pathlib|re|typing|gzip)\..*"),
    (r"py:.*", r"[A-Z]\w*Error|object|str|int|bytes|bool|tuple|dict|list|None"),
    (r"py:.*", r"(jax|numpy|flax)\..*"),
    (r"py:.*", r"treering\..*\.T"),  # type variables of generic classes
    # Base classes.
    (r"py:class", r"treering\._store\.(api\.(Store|Closable)|objects\.store\.ObjectStore)"),
    (r"py:class", r"treering\.(_arrays\.host\.BoxedArray|testing\.formats\.FormatContract|rules\.(_Every|_AnyOf))"),
]
