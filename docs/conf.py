"""How `hatch run docs` makes the site: these pages, packages' readmes, and every public name."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import Any, Final

import zero_engine

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = (
    *("zero_engine", "zero_partition", "zero_offload", "zero_ckpt", "zero_comm", "zero_deepspeed"),
)
BLOCKS: Final = {  # what may be imported besides what a package's `__init__` lists
    "zero_engine": ("checkpoint", "engine", "planning"),
    "zero_partition": ("plan", "planning", "seams"),
    "zero_offload": ("residence",),
    "zero_ckpt": (),
    "zero_comm": ("codecs", "planning"),
    "zero_deepspeed": (),
}

# "See `that`" or "As `that`" says it by a link, in the first line of a docstring.
WHO_CALLS: Final = re.compile(r"collective|every rank|\blocal|\A.*\b(see|as) `", re.IGNORECASE)
METHODS_ARE: Final = re.compile(r"methods are [a-z]+")

project = "zero"
version = release = zero_engine.__version__
author = project_copyright = "The zero authors"
root_doc = "docs/index"
include_patterns = ["docs/**", "packages/*/*.md", "benchmarks/README.md", "*.md"]
exclude_patterns = ["docs/_build"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 3
default_role = "py:obj"  # a name in backticks links to where it is documented
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": False}
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
html_theme = "furo"
html_title = "zero"
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_extra_path = ["site"]  # index.html, which leads to `root_doc`


def write_api(_: Any) -> None:
    """Write a page of names for each package, and for each of its building blocks."""
    folder = ROOT / "docs" / "api"
    folder.mkdir(exist_ok=True)
    homes: dict[int, str] = {}
    for package in reversed(PACKAGES):  # a name that two list is described where it comes from
        for block in ("", *BLOCKS[package]):
            module = import_module(".".join(filter(None, (package, block))))
            page = folder / f"{module.__name__}.rst"
            page.write_text("\n".join(_page(module, homes)))


def _page(module: Any, homes: dict[int, str]) -> list[str]:
    name = module.__name__
    lines = [name, "=" * len(name), "", f".. currentmodule:: {name}", ""]
    lines += [str(module.__doc__).partition("\n")[0], ""]
    lines += ["Names are there since 0.1.0, but where they say another version.", ""]
    elsewhere = []
    for public in sorted(module.__all__, key=str.lower):
        value = getattr(module, public)
        home = homes.setdefault(id(value), f"{name}.{public}")
        if public.startswith("__"):
            continue
        if home != f"{name}.{public}":
            elsewhere.append(f"- `{public} <{home}>`")
        elif isinstance(value, type):
            lines += [f".. autoclass:: {name}.{public}", ""]
        else:
            kind = "autofunction" if isfunction(value) else "py:data"
            lines += [f".. {kind}:: {name}.{public}", ""]
    if elsewhere:
        lines += ["Also here", "---------", "", *elsewhere, ""]
    return lines


def mark_local(*event: Any) -> None:
    """Say that a call is local where neither its docstring nor its class says what it is."""
    _, what, name, *_, lines = event
    said = "\n".join(lines)
    if what == "method":
        module, owner, _ = name.rsplit(".", 2)
        said += "".join(METHODS_ARE.findall(str(getattr(import_module(module), owner).__doc__)))
    if what in {"function", "method"} and not WHO_CALLS.search(said):
        end = lines.index("") if "" in lines else len(lines)
        lines[end:end] = ["*Local*: one rank may call it alone."]


def mark_code(*event: Any) -> None:
    """Let indented examples of docstrings be code; what is below "Args:" is not one."""
    lines: list[str] = event[-1]
    for at in range(len(lines) - 1, 1, -1):
        is_example = lines[at].startswith("    ") and not lines[at - 1] and lines[at - 2][:1] != " "
        if is_example and lines[at - 2]:
            lines[at:at] = ["::", ""]


def setup(app: Any) -> None:
    """Connect what runs before pages are read, and before docstrings are."""
    app.connect("builder-inited", write_api)
    app.connect("autodoc-process-docstring", mark_local, priority=300)
    app.connect("autodoc-process-docstring", mark_code, priority=400)
