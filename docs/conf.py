"""How `hatch run docs` makes the site: these pages, packages' readmes, and every public name."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import Any, Final

import zero_engine
from sphinx.errors import ExtensionError

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
FOUND_BY: Final = {  # query -> pages, each of which must be among the first three results
    "out of memory": ("docs/guides/offload",),
    "resume": ("docs/guides/checkpoints",),
    "offload": ("docs/guides/offload",),
    "checkpoint": ("docs/guides/checkpoints",),
    "qlora": ("docs/guides/fine-tuning",),
    "ema": ("docs/guides/ema",),
    "hang": ("docs/guides/hangs",),
    "slurm": ("docs/guides/multi-node",),
    "tensor parallelism": ("docs/guides/composition",),
    "clip_grad_norm_": ("docs/api/zero_engine", "docs/guides/accumulation"),
    "shard": ("docs/api/zero_engine",),
}

project = "zero"
version = release = zero_engine.__version__
author = project_copyright = "The zero authors"
root_doc = "docs/index"
include_patterns = ["docs/**", "packages/*/*.md", "benchmarks/README.md", "*.md"]
exclude_patterns = ["docs/_build"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
extensions += ["sphinx_copybutton", "sphinx_design"]

myst_enable_extensions = ["colon_fence"]  # which GitHub shows as text, with its links
myst_heading_anchors = 3
default_role = "py:obj"  # a name in backticks links to where it is documented
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
html_theme = "furo"
html_title = "zero"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["site"]  # index.html, which leads to `root_doc`
html_search_scorer = str(ROOT / "docs/search/scorer.js")
copybutton_prompt_text = "$ "


def write_api(_: Any) -> None:
    """Write a page of names for each package, and for each of its building blocks."""
    folder = ROOT / "docs" / "api"
    folder.mkdir(exist_ok=True)
    homes: dict[int, str] = {}
    # A name that several list is described by zero_engine, else where it comes from.
    for package in (PACKAGES[0], *reversed(PACKAGES[1:])):
        for block in ("", *BLOCKS[package]):
            module = import_module(".".join(filter(None, (package, block))))
            page = folder / f"{module.__name__}.rst"
            page.write_text("\n".join(_page(module, homes)))


def _page(module: Any, homes: dict[int, str]) -> list[str]:
    name = module.__name__
    lines = [name, "=" * len(name), "", f".. currentmodule:: {name}", ""]
    lines += [str(module.__doc__).partition("\n")[0], ""]
    lines += ["Names are there since 0.1.0, but where they say another version.", ""]
    uses = num_pages_that_name(name, module.__all__)
    if any(uses.values()):
        lines += ["Those that most guides name come first.", ""]
    elsewhere = []
    for public in sorted(module.__all__, key=lambda each: (-uses[each], each.lower())):
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


def num_pages_that_name(module: str, names: list[str]) -> dict[str, int]:
    """Count the guides whose code or text has each name, qualified or imported from the module."""
    folders = (ROOT / "docs", ROOT / "docs/guides", ROOT / "docs/coming-from")
    pages = [page.read_text() for folder in folders for page in sorted(folder.glob("*.md"))]
    found = dict.fromkeys(names, 0)
    for text in pages:
        imported = re.findall(rf"from {re.escape(module)} import ([^\n(]+|\([^)]+)", text)
        shown = {*re.findall(r"\w+", " ".join(imported))}
        shown |= {*re.findall(rf"\b{re.escape(module)}\.(\w+)", text)}
        for name in shown & found.keys():
            found[name] += 1
    return found


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


def check_search(app: Any, error: Exception | None) -> None:
    """Ask the built search for `FOUND_BY`, where node can run it; then print where the site is.

    Raises:
        ExtensionError: A page is not among the first three results for its query.
    """
    if error is not None or app.builder.name != "html":
        return
    if node := shutil.which("node"):
        script = ROOT / "docs/search/first.js"
        wrong = []
        for query, pages in FOUND_BY.items():
            command = [node, str(script), str(app.outdir), query]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            first = ran.stdout.splitlines()
            wrong += [f"{query!r}: {page} is not in {first}" for page in pages if page not in first]
        if wrong:
            raise ExtensionError("\n".join(["docs/search/scorer.js ranks guides wrongly:", *wrong]))
    print(f"The site: {Path(app.outdir, 'index.html')}")


def setup(app: Any) -> None:
    """Connect what runs around the reading of pages and docstrings, and after the build."""
    app.connect("builder-inited", write_api)
    app.connect("build-finished", check_search)
    app.connect("autodoc-process-docstring", mark_local, priority=300)
    app.connect("autodoc-process-docstring", mark_code, priority=400)
