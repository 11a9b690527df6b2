"""What the pages show exists: names resolve without a warning, examples run as they are."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import scripts
import torch
import zero_engine
from zero_engine import Precision, ZeroConfig, cli
from zero_partition import PartitionError

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
    if page.name != "CHANGELOG.md"  # says what was
)
IMPORTED: Final = re.compile(r"^\s*from (zero_[\w.]+) import (?:\(([^)]*)\)|([\w ,]+))", re.M)
OURS: Final = "comm|partition|offload|ckpt|engine|deepspeed"
DOTTED: Final = re.compile(rf"\bzero_(?:{OURS})(?:\.[A-Za-z]\w*)+")
ALONE: Final = ("comm", "partition", "offload", "ckpt")
MOVED: Final = {
    "zero_partition": {"STAGES": "plan", "Stage": "plan"},
    "zero_engine": {
        "DynamicLossScale": "engine",
        "EngineConfig": "engine",
        "LossScaler": "engine",
        "Room": "planning",
        "StopSignals": "checkpoint",
        "plan_options": "planning",
        "recommend": "planning",
    },
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_names_that_a_page_shows_exist(page: Path) -> None:
    """A reader types what is there; a name that moved would work, and warn."""
    text = page.read_text()
    shown = {name.removesuffix(".md") for name in DOTTED.findall(text) if not name.endswith(".py")}
    for module, listed, line in IMPORTED.findall(text):
        names = re.sub(r"#.*", "", listed or line).replace("\n", " ").split(",")
        shown |= {f"{module}.{name.split(' as ')[0].strip()}" for name in names if name.strip()}

    with warnings.catch_warnings(action="error"):
        missing = {name for name in shown if not _exists(name)}

    assert not missing


@pytest.mark.parametrize(
    "page",
    [ROOT / "docs/architecture.md", *sorted(ROOT.glob("docs/how/*.md"))],
    ids=lambda page: page.stem,
)
def test_what_a_page_about_the_code_quotes_is_a_name_in_it(page: Path) -> None:
    """Private names move without a warning. Paths and commands are left to other tests."""
    source = "".join(file.read_text() for file in ROOT.glob("packages/*/src/**/*.py"))
    prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    quoted = [q for q in re.findall(r"`([^`\n]+)`", prose) if "/" not in q and "hatch" not in q]
    names = {name for quote in quoted for name in re.findall(r"[A-Za-z_]\w*", quote)}
    missing = names - {*re.findall(r"[A-Za-z_]\w*", source)}

    assert names
    assert not missing


@pytest.mark.parametrize("package", [*OURS.split("|")])
def test_a_package_says_how_large_it_is(package: str) -> None:
    """To the twentieth part."""
    folder = ROOT / f"packages/zero-{package}"
    files = [*(folder / "src").rglob("*.py")]
    [said] = re.findall(
        r"^Its size: ([\d,]+) lines of Python", (folder / "README.md").read_text(), re.M
    )

    num_lines = sum(len(file.read_text().splitlines()) for file in files)
    assert int(said.replace(",", "")) == pytest.approx(num_lines, rel=0.05)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    """To a file or folder that is there, and to a heading of it."""
    wrong = []
    prose = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        where, _, heading = link.partition("#")
        target = (page.parent / where).resolve() if where else page
        if "://" in link:
            continue
        if not target.exists() or (heading and heading not in _headings(target)):
            wrong.append(link)

    assert not wrong


# torch takes long to import: once, before each child runs an example of its own.
PROGRAM: Final = """
import os, sys, torch
for block in sys.argv[1:]:
    if not os.fork():
        exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
        sys.exit()
    assert not os.wait()[1], block
"""


def test_measured_tables_are_those_of_the_files_of_results() -> None:
    """`hatch run measured` writes the page; a figure that was written by hand has no file."""
    writes = "import measured, sys; sys.stdout.write(measured.page())"
    command, where = [sys.executable, "-c", writes], ROOT / "benchmarks"
    page = subprocess.run(command, cwd=where, capture_output=True, check=True, text=True).stdout

    assert (ROOT / "docs/measured.md").read_text() == page


def test_first_examples_run_as_they_stand(tmp_path: Path) -> None:
    """Who installs one package pastes this first; below, zero-engine's."""
    pages = [ROOT / "packages" / f"zero-{name}" / "README.md" for name in ALONE]
    blocks = [re.search(r"^```python\n(.*?)^```", p.read_text(), re.M | re.S) for p in pages]

    ran = subprocess.run(
        [
            *(sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", PROGRAM),
            *(block[1] for block in blocks if block is not None),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
    )

    assert all(blocks)
    assert not ran.returncode, ran.stderr


@pytest.mark.parametrize(
    ("package", "name", "home"),
    [(package, name, home) for package, names in MOVED.items() for name, home in names.items()],
)
def test_a_name_that_moved_still_works_and_says_where_it_is(
    package: str, name: str, home: str
) -> None:
    """Old scripts go on until the version that the warning names."""
    module = import_module(package)
    vars(module).pop(name, None)  # a name that was asked for is kept

    with pytest.warns(DeprecationWarning, match=rf"{package}\.{name} is {package}\.{home}\.{name}"):
        found = getattr(module, name)

    assert found is getattr(import_module(f"{package}.{home}"), name)


def test_the_site_calls_nothing_local_that_ranks_must_call_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who then calls it on one rank waits for ever. What says nothing, the site calls local."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    conf = import_module("conf")
    modules = [".".join(filter(None, (p, b))) for p in conf.PACKAGES for b in ("", *conf.BLOCKS[p])]
    wrong, num_collective = [], 0
    for module, name in ((m, name) for m in modules for name in import_module(m).__all__):
        value = getattr(import_module(module), name)
        kind = "method" if isinstance(value, type) else "function"
        for attr, found in vars(value).items() if kind == "method" else [("", value)]:
            call = inspect.unwrap(getattr(found, "__func__", found))
            if attr.startswith("_") or not inspect.isfunction(call):
                continue
            path = ".".join(filter(None, (module, name, attr)))
            lines = str(inspect.getdoc(call)).splitlines()
            conf.mark_local(None, kind, path, lines)
            is_collective = "@collective" in inspect.getsource(call).partition("def ")[0]
            num_collective += is_collective
            if call.__doc__ is None or (is_collective and "*Local*" in "".join(lines)):
                wrong.append(path)

    assert not wrong
    assert num_collective


def _headings(page: Path) -> list[str]:
    """As GitHub makes anchors of them."""
    found = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found]


def _exists(name: str) -> bool:
    module, *rest = name.split(".")
    found: Any = import_module(module)
    for at, part in enumerate(rest):
        if not hasattr(found, part):
            try:
                import_module(".".join([module, *rest[: at + 1]]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


# ---- Words of ours ----

# No page uses these for anything else, so each can be asked for a link at the first use.
PLAIN: Final = (
    *("unit", "layout", "span", "placement", "slot", "stand-in", "residence", "footprint", "torn"),
    *("hop", "codec", "manifest"),
)
EXPLAINING: Final = [
    *(
        ROOT / f"docs/{name}.md"
        for name in ("start", "memory", "architecture", "checkpoint-format")
    ),
    *sorted(ROOT / page for name in ("how", "guides") for page in ROOT.glob(f"docs/{name}/*.md")),
]


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("settings.md", zero_engine.ZeroConfig),
        ("guides/precision.md", zero_engine.Precision),
        ("guides/offload.md", zero_engine.Offload),
        ("guides/networks.md", zero_engine.Wire),
    ],
)
def test_a_table_of_settings_has_each_with_its_default(page: str, kind: type) -> None:
    """A row starts with the setting; where a table has defaults, they come second."""
    text = (ROOT / "docs" / page).read_text()
    rows = re.findall(r"^\| `(\w+)(?:=[^`]*)?` \| ([^|]*) \|", text, re.M)
    said = {name: cell.strip("` ") for name, cell in rows}
    settings = {each.name: each.default for each in attrs.fields(kind)}
    assert said.keys() >= settings.keys()
    has_defaults = "| default |" in text
    for name, default in settings.items():
        is_value = re.fullmatch(r"None|True|False|\d+|\"\w+\"", said[name])
        if has_defaults and is_value:
            value = default.factory() if isinstance(default, attrs.Factory) else default
            assert ast.literal_eval(said[name]) == value, name


# They send nothing, but ranks that differ in them are no longer equal.
LOCAL_ON_ALL: Final = {"clip_grad_value_", "set_local_optimizer_state", "release_buffers"}


def test_the_table_of_collective_calls_has_every_function_in_its_row() -> None:
    """What only some ranks call waits for the others, so a reader looks a function up there."""
    page = (ROOT / "docs/guides/hangs.md").read_text()
    table = page.split("## Calls that all ranks must make")[1].split("\n## ")[0]
    rows = dict.fromkeys(("all", "any"), "")
    for line in table.splitlines():
        if line.startswith(("| `", "| forward")):
            functions, ranks = line.strip("| ").split(" | ")
            rows[re.match(r"\w+", ranks).group()] += functions  # type: ignore[union-attr]
    of = {ranks: set(re.findall(r"`([\w.]+)`", text)) for ranks, text in rows.items()}
    public = {name: getattr(zero_engine, name) for name in zero_engine.__all__}
    functions = {name for name, value in public.items() if inspect.isfunction(value)}
    assert functions <= of["all"] | of["any"]
    for name in functions & of["any"]:
        assert "Local." in inspect.getdoc(public[name]), name  # type: ignore[operator]
    for name in functions & of["all"]:
        said = inspect.getdoc(public[name]) or ""
        assert re.search(r"[Cc]ollective|[Ee]very rank|all ranks", said) or name in LOCAL_ON_ALL


def test_every_word_of_ours_is_explained_and_some_page_leads_there() -> None:
    """A word that no page needs is one too many; 25 are many."""
    text = (ROOT / "docs/vocabulary.md").read_text()
    words = {word.replace(" ", "-") for word in re.findall(r"(?m)^### (.*)$", text)}
    linked = {
        word for page in PAGES for word in re.findall(r"vocabulary\.md#([\w-]+)", page.read_text())
    }

    assert words == linked
    assert {*PLAIN} <= words
    assert len(words) <= 25


# Words that a reader would have to learn, with plain ones in their place: "home" is memory or the
# host, to "lend" is to expose, to "deal" is to assign, to "settle" is to wait or to flush.
BANNED: Final = {
    *("home", "homes", "lend", "lends", "lent", "lender", "lenders", "deal", "deals", "dealt"),
    *("settle", "settles", "settled", "linger", "lingers", "remains", "let_go", "lets_go"),
    *("take_back", "takes_back", "keep_whole", "keeps_whole", "hand_over", "hands_over"),
    *("bring_in", "brings_in", "come_back", "comes_back", "come_to_rest", "lay_down"),
    *("step_elsewhere", "as_it_holds"),
}


def _identifiers() -> dict[str, Path]:
    """Names that the packages give to something, in lower case with underscores, and where."""
    found: dict[str, Path] = {}
    for file in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                    pass
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    pass
                case ast.arg(arg=name):
                    pass
                case _:
                    continue
            words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
            found["_".join(words).lower()] = file
    return found


def test_every_word_of_the_vocabulary_is_a_part_of_a_name_in_the_code() -> None:
    """A word that the code does not use is not worth learning; one that was renamed goes, too."""
    text = (ROOT / "docs/vocabulary.md").read_text()
    verbs = ", ".join(row[0] for row in _rows("docs/vocabulary.md", "undone by")).split(", ")
    headings, defined = re.findall(r"(?m)^### (.*)$", text), re.findall(r"\*\*(\w+)\*\*", text)
    words = {re.sub("[ -]", "_", word) for word in (*headings, *defined, *verbs)}
    names = "".join(f"_{name}_" for name in _identifiers())
    unused = {word for word in words if f"_{word.replace('parameter', 'param')}_" not in names}

    assert verbs
    assert not unused


def test_no_name_in_the_code_has_a_word_that_a_reader_would_have_to_learn() -> None:
    """Each of these has a plain word in its place, as torch, FSDP2 or DeepSpeed have it."""
    found = {
        f"{name} in {file.relative_to(ROOT)}"
        for name, file in _identifiers().items()
        if any(f"_{word}_" in f"_{name}_" for word in BANNED)
    }

    assert not found


@pytest.mark.parametrize("page", EXPLAINING, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_page_links_the_first_use_of_a_word_of_ours(page: Path) -> None:
    """Who reads one page alone must not have to guess."""
    not_prose = r"(?ms)^```.*?^```|`[^`\n]*`|^#[^\n]*$|^    [^\n]*$|\*"
    other_links = r"\[[^\]]*\]\((?!\S*vocabulary\.md#)[^)]*\)"
    prose = re.sub(other_links, "", re.sub(not_prose, "", page.read_text()))
    unexplained = []
    for word in PLAIN:
        first = re.search(rf"(?i)\b{word}s?\b(.*)", prose)
        if first and not re.match(rf"\]\([./]*vocabulary\.md#{word}\)", first[1]):
            unexplained.append(word)

    assert not unexplained


# ---- Bytes ----


def _rows(page: str, column: str) -> list[list[str]]:
    """Cells of the table of a page whose head has the column, below the head."""
    tables = re.findall(r"(?m)(?:^\|.*\n)+", (ROOT / page).read_text())
    [table] = [table for table in tables if column in table.partition("\n")[0]]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def _bytes_of_gpt(world_size: int, stage: int) -> float:
    """Bytes per parameter of the GPT of `hatch run bench step`, with gradients and buffers."""
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.append(str(ROOT / "benchmarks"))
    benchmark = import_module("model")
    with torch.device("meta"):
        model = benchmark.GPT(benchmark.SHAPES["25m"])
    config = ZeroConfig(stage=stage)
    plan = zero_engine.plan(model, config, world_size=world_size, device="cpu")
    return plan.memory.before_step.total_bytes / plan.numel


@pytest.mark.parametrize("stage", range(4))
def test_the_bytes_with_buffers_are_those_that_a_plan_says(stage: int) -> None:
    """Who chooses a stage by the formula of model state alone runs out of memory at stage 1."""
    planned = [f"{_bytes_of_gpt(world_size, stage):.1f}" for world_size in (2, 8)]
    size = zero_engine.planning.GPTSize(32, 4096, params=7 * 10**9, dtype=torch.bfloat16)
    config = ZeroConfig(stage=stage, precision=Precision(params=torch.bfloat16))

    assert _rows("README.md", "with buffers, at 2 ranks")[stage][3:5] == planned
    *of_gpt, of_large = _rows("docs/memory.md", "bytes per parameter, with")
    assert [row[1 + stage] for row in of_gpt] == planned
    if stage == 0:
        assert of_large[1] == "refused"
        with pytest.raises(PartitionError):
            zero_engine.plan(size, config, world_size=8)
        return
    peak = zero_engine.plan(size, config, world_size=8).memory.step_peak_bytes
    assert of_large[1 + stage] == f"{peak / size.params:.1f} ({peak / 2**30:.0f} GiB)"


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize(
    ("precision", "sizes"),
    [
        pytest.param(Precision(), {"p": 4, "g": 4, "o": 8}, id="fp32"),
        pytest.param(Precision(params=torch.bfloat16), {"p": 2, "g": 4, "o": 12}, id="bf16"),
    ],
)
def test_the_formulas_of_bytes_are_those_of_a_plan(
    precision: Precision, sizes: dict[str, int], world_size: int
) -> None:
    """To the byte, of a model of equal units; flags and padding are apart.

    The peak on a GPU has also what autograd holds, the gradients of a unit at most.
    """
    rows = _rows("docs/memory.md", "with gradients and buffers, in a step")
    for stage, _, on_cpu, on_gpu, _ in rows:
        if stage == "0" and precision.params is not None:
            continue  # there are no masters
        with torch.device("meta"):
            pairs = [[torch.nn.Linear(64, 64, bias=False) for _ in range(2)] for _ in range(8)]
            model = torch.nn.Sequential(*(torch.nn.Sequential(*pair) for pair in pairs))
        config = ZeroConfig(stage=int(stage), precision=precision, min_unit_bytes=0)
        for device, formula in (("cpu", on_cpu), ("cuda", on_gpu)):
            plan = zero_engine.plan(model, config, world_size=world_size, device=device)
            report, values = plan.memory.before_step, {**sizes, "N": world_size, "P": plan.numel}
            chosen = (on_cpu if formula == "the same" else formula).replace("*", "")
            written = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", chosen)
            expected = eval(written, values | {"U": 2 * 64 * 64})
            apart = report.scalars_bytes + report.padding_bytes
            if device == "cpu":
                assert report.total_bytes - apart == expected
                continue
            if stage == "3" and precision.params is not None:
                expected -= sizes["p"] * plan.numel / world_size
            rest = plan.memory.step_peak_bytes - apart - expected
            assert 0 <= rest <= sizes["p"] * 2 * 64 * 64, (stage, rest)


PLANNING: Final = (ROOT / "docs/guides/planning.md").read_text()
SHOWN_PLANS: Final = dict(re.findall(r"(?m)^    \$ (zero plan .*)\n((?:(?:    .*)?\n)+)", PLANNING))


@pytest.mark.parametrize("command", SHOWN_PLANS)
def test_the_plan_that_the_guide_shows_is_what_the_command_prints(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader compares sizes of a model of theirs with these; all are in units of one kind."""
    lines = SHOWN_PLANS[command].rstrip("\n").splitlines()

    assert cli.main(command.split()[1:]) == 0
    printed = capsys.readouterr().out
    assert [line.removeprefix("    ") for line in lines] == printed.splitlines()
    assert {*re.findall(r"\d ([KMGT]i?B)\b", printed)} <= {"KiB", "MiB", "GiB", "TiB"}


@pytest.mark.parametrize("command", re.findall(r"(?m)^zero plan .*$", PLANNING))
def test_each_command_of_the_guide_plans_a_model_and_says_whether_it_fits(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The files are a small Llama's and one written for DeepSpeed."""
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    deepspeed = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    deepspeed["train_micro_batch_size_per_gpu"] = 1
    (tmp_path / "ds.json").write_text(json.dumps(deepspeed))
    monkeypatch.chdir(tmp_path)
    stage = {"--stage 3": "stage 3", "ds.json": "stage 2 + host optimizer"}
    expected = next((name for part, name in stage.items() if part in command), "")

    assert cli.main(command.split()[1:]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(expected)
    assert re.search(r"(?m)^stage \d.* fits in \d+\.\d GiB: ", printed)


# ---- Pictures ----


def _drawn(name: str, pool: Any, folder: Path) -> list[Any]:
    """The axes of a picture of docs/pictures, drawn anew."""
    sys.path.insert(0, str(ROOT / "docs/pictures"))
    figure = import_module("draw").PICTURES[name][1](pool, str(folder))
    figure.savefig(folder / f"{name}.svg")
    return figure.axes


def _bars(axis: Any, row: int) -> list[Any]:
    """Left to right."""
    found = [bar for bar in axis.patches if round(bar.get_y() + bar.get_height() / 2) == row]
    return sorted(found, key=lambda bar: bar.get_x())


@pytest.mark.slow
def test_the_picture_of_a_unit_shows_every_element_once_and_cuts_where_it_may(
    tmp_path: Path,
) -> None:
    """Between rows of the parameter, or between parameters, is for the optimizer to rely on."""
    [axis] = _drawn("units", None, tmp_path)
    shapes = {n: p.shape for n, p in import_module("draw").FeedForward().named_parameters()}
    names = {id(bars[0]): bars.get_label() for bars in axis.containers}
    for row, grain_of in enumerate((lambda _: 16, lambda s: s[1:].numel(), torch.Size.numel)):
        bars = _bars(axis, row)
        ends = [0, *(bar.get_x() + bar.get_width() for bar in bars)]
        params = {names[id(bar)]: bar for bar in bars if names[id(bar)] != "padding"}
        assert [bar.get_x() for bar in bars] == ends[:-1]
        numels = {name: bar.get_width() for name, bar in params.items()}
        assert numels == {name: shape.numel() for name, shape in shapes.items()}
        for lines in axis.collections[4 * row : 4 * row + 4]:
            for (place, _), _ in lines.get_segments():
                for name, bar in params.items():
                    at = place - bar.get_x()
                    assert not 0 < at < bar.get_width() or not at % grain_of(shapes[name])


@pytest.mark.slow
def test_the_picture_of_placements_is_the_table_of_zero(tmp_path: Path) -> None:
    """Over how many ranks parameters, gradients and state are divided (arXiv 1910.02054)."""
    for axis, divided in zip(
        _drawn("placements", None, tmp_path), ((), (2,), (1, 2), (0, 1, 2)), strict=True
    ):
        for kind in range(3):
            filled = [b.get_width() for b in _bars(axis, kind) if b.get_facecolor()[3]]
            assert sum(filled) == pytest.approx(0.9 * (1 if kind in divided else 4))


@pytest.mark.drawn(3)
@pytest.mark.slow
def test_the_picture_of_slots_has_the_order_of_plain_torch(ranks, tmp_path: Path) -> None:
    """And no two units in one slot at a time."""
    axes = _drawn("slots", ranks(2), tmp_path)
    model, order = import_module("draw").Transformer(), []
    for name, module in {
        "(model)": model,
        **{f"blocks.{i}": b for i, b in enumerate(model.blocks)},
    }.items():
        module.register_forward_pre_hook(lambda *_, name=name: order.append(name))
        module.register_full_backward_pre_hook(lambda *_, name=name: order.append(name))
    model(torch.randn(1, 2, 512, requires_grad=True)).sum().backward()

    for axis in axes:
        labels = sorted(axis.texts, key=lambda text: text.get_position()[0])
        assert [text.get_text() for text in labels] == order
        for slot in range(4):
            whole = [bar for bar in _bars(axis, slot) if bar.get_alpha()]
            for bar, after in itertools.pairwise(whole):
                assert bar.get_x() + bar.get_width() <= after.get_x()


# ---- Every block of the guides, on two ranks ----


FOLDERS: Final = ("guides", "coming-from", "how")
GUIDES: Final = [
    *(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "docs/start.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT / page for name in FOLDERS for page in ROOT.glob(f"docs/{name}/*.md")),
]
GOES_ON: Final = ("accelerate", "ddp", "deepspeed", "fsdp2", "megatron", "trainer")  # started again
CPU_ONLY: Final = {
    "accelerate": "Accelerate knows the kinds of devices by name",
    "hangs": "a rank in torch's barrier waits for its device, until its timeout",
    "lightning": "Lightning knows the kinds of devices by name",
}
NEEDS: Final = {"fine-tuning": ("bitsandbytes", "trl")}  # else the page is not run
SHOWS_OUTPUT: Final = (ROOT / "README.md", ROOT / "docs/guides/lora.md")
SHOWN: Final = re.compile(r"^    \$ (?:torchrun|python) .*\n((?:    [^$\n].*\n)+)", re.M)
FIGURE: Final = re.compile(r"\d+\.\d+")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=f"{page.parent.name}-{page.stem}",
            marks=[pytest.mark.cpu_only(CPU_ONLY[page.stem])] if page.stem in CPU_ONLY else [],
        )
        for page in GUIDES
    ],
)
def test_the_blocks_of_a_page_run_from_top_to_bottom_on_two_ranks(
    page: Path, ranks, tmp_path: Path
) -> None:
    """A reader pastes one after the other; what they write is in the folder they are run in."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert blocks, "a guide without code"
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    script = tmp_path / f"{page.stem}.py"
    # On the first line of the page, so that lines in errors are those of the page.
    enter = f"import os; here = os.getcwd(); os.chdir({str(tmp_path)!r}); "
    script.write_text("\n".join([enter + blocks[0], *blocks[1:], "os.chdir(here)"]))

    num_runs = 1 + (page.stem in GOES_ON)
    printed = "".join(scripts.on_ranks(ranks)(str(script), []) for _ in range(num_runs))
    printed = printed.replace(f"{tmp_path}/", "")
    for shown in re.findall(r"^```text\n(.*?)^```", page.read_text(), re.M | re.S):
        assert " ".join(shown.split()) in " ".join(printed.split()), printed
    if page.parent.name == "coming-from" or page in SHOWS_OUTPUT:
        _check_output(page.read_text(), printed, tmp_path)


def _check_output(text: str, printed: str, folder: Path) -> None:
    """Compare the lines that a page shows with those of its runs, which name losses and files."""
    shown = [line.strip() for lines in SHOWN.findall(text) for line in lines.splitlines()]
    lines = iter(printed.splitlines())
    for line in shown:
        assert any(_is_like(line, found) for found in lines), f"no {line!r} in\n{printed}"
    paths = re.findall(r"\bloss \d+\.\d+\b.*checkpoint in (\S+)", printed)
    assert shown
    assert paths
    assert all((folder / path).is_dir() for path in paths)


def _is_like(shown: str, found: str) -> bool:
    """Whether lines are equal but for figures with a point, which devices and versions change."""
    if FIGURE.split(shown) != FIGURE.split(found):
        return False
    figures = [[float(each) for each in FIGURE.findall(line)] for line in (shown, found)]
    return figures[0] == pytest.approx(figures[1], rel=0.25, abs=0.02)


INDEX: Final = (ROOT / "docs/index.md").read_text()
TABS: Final = dict(re.findall(r"(?ms)^:::\{tab-item\} ([^\n]*)\n```python\n(.*?)^```", INDEX))


@pytest.mark.parametrize(
    "tab",
    [
        pytest.param(
            tab,
            marks=[pytest.mark.cpu_only(CPU_ONLY[tab.lower()])] if tab.lower() in CPU_ONLY else [],
        )
        for tab in TABS
    ],
)
def test_the_loop_of_each_tab_of_the_index_runs_on_two_ranks(
    tab: str, ranks, tmp_path: Path
) -> None:
    """What a reader sees first is a whole program."""
    script = tmp_path / "loop.py"
    enter = f"import os\nhere = os.getcwd()\nos.chdir({str(tmp_path)!r})"
    script.write_text("\n".join([enter, TABS[tab], "os.chdir(here)"]))

    scripts.on_ranks(ranks)(str(script), [])


def test_the_index_names_every_guide_in_a_card_and_in_the_menu() -> None:
    """A page that no task leads to is not read."""
    cards, _, menu = INDEX.partition("## The loop")
    guides = {
        f"{folder}/{page.stem}"
        for folder in ("guides", "coming-from")
        for page in ROOT.glob(f"docs/{folder}/*.md")
    }

    assert guides <= {*re.findall(r"\]\(([\w/-]+)\.md[)#]", cards)}
    assert guides <= {*re.findall(r"(?m)<([\w/-]+)>$", menu)}
