"""Every code block of the README and of docs/ runs as it stands there, or says why it doesn't.

Python blocks of a page are one program, on two ranks. Those with a title are files, which the shell
blocks of the page start. Comments of HTML, which readers don't see, say more:

    <!-- hidden … -->        Python that runs between the blocks: what they need, what must follow
    <!-- not run: … -->      the reason why the next block isn't run
    <!-- output -->          the next text is what the page's commands print, in any order of lines
    <!-- append -->          the next file's text comes behind what is there
    <!-- needs: torch -->    what the page's program imports; without, it isn't run
    <!-- slow -->            the page's commands run where slow tests do
    <!-- copy -->            the page changes a copy of the repository
"""

import ast
import importlib.util
import inspect
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import collectives
import strategies
from bench import figures
from collectives import CollectiveError
from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.programs import run_launcher

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "sh", "text", "mermaid"}
OTHERWISE_RUN = {"train", "test"}  # by .ci/run

PIECE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^ *```$"
    r"|^<!-- hidden\n(?P<hidden>.*?)^-->$"
    r"|^<!-- (?P<marker>(?!hidden).*?) -->$",
    re.MULTILINE | re.DOTALL,
)

DRIVER = """
import json, sys
import collectives

comm = collectives.world(deadline=30)
for name, blocks in json.loads(sys.argv[1]).items():
    namespace = {"__name__": "__main__"}
    for line, code in blocks:
        exec(compile("\\n" * (line - 1) + code, name, "exec"), namespace)
    comm.deadline = 30
    comm.barrier(name)
    if comm.rank == 0:
        print(f"<{name}>", flush=True)
"""


@dataclass
class Block:
    """A block of code, and the marker before it."""

    language: str
    title: str | None
    code: str
    line: int
    marker: str = ""

    @property
    def runs(self):
        return not self.marker.startswith("not run:") and self.marker not in OTHERWISE_RUN


class Page:
    def __init__(self, path):
        self.path, self.name = path, str(path.relative_to(ROOT))
        self.text = path.read_text(encoding="utf-8")
        self.blocks, marker = [], ""
        self.markers = set()
        for piece in PIECE.finditer(self.text):
            line = self.text[: piece.start()].count("\n") + 2
            if piece["marker"]:
                marker = piece["marker"]
                self.markers.add(marker)
            elif piece["hidden"] is not None:
                self.blocks.append(Block("python", None, piece["hidden"], line))
            else:
                code = re.sub(rf"^{piece['indent']}", "", piece["code"], flags=re.MULTILINE)
                self.blocks.append(Block(piece["language"], piece["title"], code, line, marker))
                marker = ""
        # Sorted, since the names of tests must be the same in the processes that share them.
        self.needs = sorted(
            each.split(": ")[1] for each in self.markers if each.startswith("needs: ")
        )

    def of(self, language, *, files=False):
        chosen = [each for each in self.blocks if each.language == language and each.runs]
        return [each for each in chosen if bool(each.title) == files]

    @property
    def program(self):
        return [(block.line, block.code) for block in self.of("python")]


pages = [Page(path) for path in PAGES]
# What the pages of one framework need is imported once.
programs = sorted({tuple(page.needs) for page in pages if page.program})


def run_pages(launch, chosen):
    """All their programs, in one world; the output names those that have ended."""
    content = json.dumps({page.name: page.program for page in chosen})
    ended = launch(2, [sys.executable, "-c", DRIVER, content], timeout=120)
    # mpirun may join lines that ranks write at once.
    left = [page.name for page in chosen if f"<{page.name}>" not in ended.stdout]
    assert ended.returncode == 0, f"{left[:1]} failed\n{ended.stderr}"
    assert not left
    return ended


@pytest.mark.parametrize("needs", programs, ids=lambda needs: "+".join(needs) or "numpy")
def test_the_programs_of_the_pages(launch, needs):
    missing = [each for each in needs if importlib.util.find_spec(each) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} isn't installed: pages that need it can't run")
    chosen = [page for page in pages if tuple(page.needs) == needs and page.program]
    run_pages(launch, chosen)


def write_files(page, folder):
    """The page's files, in a folder that is the repository's root to the commands."""
    if "copy" in page.markers:
        for name in ("collectives", "strategies", "bench"):
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    else:
        (folder / "examples").symlink_to(ROOT / "examples")
    for block in page.of("python", files=True):
        target = folder / block.title
        assert target.exists() == (block.marker == "append"), block.title
        with target.open("a", encoding="utf-8") as file:
            file.write(block.code)


with_commands = [
    pytest.param(page, marks=[pytest.mark.slow] if "slow" in page.markers else [])
    for page in pages
    if page.of("sh")
]


@pytest.mark.parametrize("page", with_commands, ids=lambda page: page.path.stem)
def test_the_commands_of_a_page(page, tmp_path):
    missing = [each for each in page.needs if importlib.util.find_spec(each) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} isn't installed: pages that need it can't run")
    write_files(page, tmp_path)
    bin_folder = Path(sys.executable).parent
    environment = {
        "PATH": os.pathsep.join([str(bin_folder), os.environ["PATH"]]),
        "PYTHONPATH": str(tmp_path if "copy" in page.markers else ROOT),
    }
    if is_open_mpi(find_mpirun()):
        environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    script = "\n".join(["set -eu", f"cd '{tmp_path}'", *(block.code for block in page.of("sh"))])
    ended = run_launcher(["bash", "-c", script], environment, timeout=120)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    # mpirun may join lines that ranks write at once.
    shown = [block.code for block in page.of("text") if block.marker == "output"]
    lines = [line for text in shown for line in text.splitlines()]
    printed = ended.stdout.replace(str(tmp_path), "/home/me")
    assert [line for line in lines if line not in printed] == []


@pytest.mark.parametrize("page", pages, ids=lambda page: page.name)
def test_blocks_are_of_a_known_kind(page):
    assert page.text.count("```") == 2 * sum(not is_hidden(page, each) for each in page.blocks)
    for block in page.blocks:
        assert block.language in LANGUAGES, f"{page.name}:{block.line}: {block.language!r}"
        if block.language == "python":
            ast.parse(block.code)
        if block.marker.startswith("not run:"):
            reason = block.marker.removeprefix("not run:").strip()
            assert reason, f"{page.name}:{block.line}"
            for path in re.findall(r"tests/[\w/]+\.py", reason):
                assert (ROOT / path).exists(), f"{page.name}:{block.line}: {path}"


def is_hidden(page, block):
    return "<!-- hidden" in page.text.splitlines()[block.line - 2]


def test_hooks_of_strategies_that_are_named_are_there():
    page = (ROOT / "docs" / "how-to" / "add-strategy.md").read_text(encoding="utf-8")
    section = page.split("## What a strategy may override")[1].split(
        "`strategies/replication/replication.py` lists"
    )[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert len(names) > 10
    assert {name for name in names if not hasattr(strategies.Strategy, name)} == set()
    calls = {name: given for cell in cells for name, given in re.findall(r"`(\w+)\((.*?)\)`", cell)}
    for name, given in calls.items():
        of_page = re.findall(r"(\w+)(?:=\w+)?(?:, |$)", given)
        _, *wanted = inspect.signature(getattr(strategies.Strategy, name)).parameters
        assert of_page in (wanted, [each for each in wanted if each != "what"]), name


@pytest.mark.parametrize("name", figures.PICTURES)
def test_pictures_are_drawn_from_the_figures_on_record(name):
    drawn = (figures.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert figures.digest(figures.sources(name)) in drawn, "draw it by python -m bench.figures"


def test_pictures_can_be_drawn(tmp_path):
    figures.draw("steps", tmp_path / "steps.svg")
    assert "Open MPI" in (tmp_path / "steps.svg").read_text(encoding="utf-8")


OLDER_NAMES = {"Sent", "CollectiveCommunication"}


@pytest.mark.parametrize("package", [collectives, strategies], ids=lambda each: each.__name__)
def test_the_reference_has_every_public_name(package):
    page = ROOT / "docs" / "reference" / f"{package.__name__}.md"
    shown = set(re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE))
    for name in set(package.__all__) - OLDER_NAMES:
        full = f"{package.__name__}.{name}"
        module = isinstance(getattr(package, name), ModuleType)
        error = issubclass_of(getattr(package, name), CollectiveError)
        assert module or error or full in shown, full


def issubclass_of(thing, kind):
    return isinstance(thing, type) and issubclass(thing, kind)


def folders_of(package):
    return [path.parent.name for path in (ROOT / package).glob("*/__init__.py")]


def modules_of(package):
    return [path.stem for path in (ROOT / package).glob("[!_]*.py")]


@pytest.mark.parametrize("package", ["collectives", "strategies"])
def test_the_architecture_names_every_folder_and_module(package):
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    section = page.split(f"## Folders of `{package}`")[1].split("\n## ")[0]
    assert [name for name in folders_of(package) if f"`{name}/`" not in section] == []
    assert [name for name in modules_of(package) if f"`{name}`" not in section] == []
    named = set(re.findall(r"`(\w+)/`", section))
    assert named <= set(folders_of(package))


@pytest.mark.parametrize("page", pages, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.text):
        if not target.startswith("http"):
            assert (page.path.parent / target).exists(), target


NAMED_TEST = re.compile(r"`((?:examples/|collectives/)?test_\w+)(?:::(\w+))?`")


def test_every_test_that_the_table_of_tensorflow_names_is_there():
    page = (ROOT / "docs" / "coming-from" / "tf-distribute.md").read_text(encoding="utf-8")
    named = NAMED_TEST.findall(page)
    assert len(named) > 60
    for file, test in named:
        path = ROOT / "tests" / f"{file if '/' in file else f'strategies/{file}'}.py"
        assert path.exists(), file
        if test:
            assert f"\ndef {test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"
