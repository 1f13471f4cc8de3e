# SPDX-License-Identifier: Apache-2.0
"""docs/api says what the code says: pages are current and complete, their examples run, and no link is dead."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest

import datadist_core
from datadist_core import transfer

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "api_docs.py"
API = ROOT / "docs" / "api"
PAGES = sorted(path.name for path in API.glob("*.md"))
READERS_FILES = [
    *(
        path
        for path in [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "examples" / "README.md"]
        if path.exists()
    ),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(API.glob("*.md")),
]
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Classes whose public attributes all have to say what they are.
DESCRIBED = [getattr(datadist_core, name) for name in datadist_core.__all__] + [transfer.Backend]
EXAMPLES_LIMIT_S = 200
RUNNER = """
import json, sys
for page, code in json.load(sys.stdin).items():
    exec(compile(code, page, "exec"), {"__name__": page})
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_docs", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture(scope="module")
def anchors() -> Counter[str]:
    """How often each name is documented, over all pages."""
    return Counter(name for page in PAGES for name in ANCHOR.findall((API / page).read_text(encoding="utf-8")))


def public_names() -> Iterator[str]:
    """Every name a user can write, found without the generator: "LLMDataDist", "LLMDataDist.init", ..."""
    for name in datadist_core.__all__:
        target = getattr(datadist_core, name)
        yield name
        if inspect.isclass(target) and target.__name__ == name:
            yield from (f"{name}.{member}" for member in public_members(target))
    yield from (n for n, c in vars(datadist_core.errors).items() if inspect.isclass(c) and issubclass(c, Exception))
    yield from transfer.__all__


def public_members(cls: type) -> set[str]:
    """Members of an enum, fields, properties, methods; those of our own bases too."""
    found = set(cls.__members__) if issubclass(cls, Enum) else set()
    if dataclasses.is_dataclass(cls):
        found |= {field.name for field in dataclasses.fields(cls)}
    for base in cls.__mro__:
        if base.__module__.startswith("datadist_core"):
            found |= {name for name, value in vars(base).items() if is_member(value)}
    return {name for name in found if not name.startswith("_")}


def is_member(value: object) -> bool:
    kinds = (property, classmethod, staticmethod)
    return isinstance(value, kinds) or inspect.isfunction(value) or inspect.ismemberdescriptor(value)


def outside_code(text: str) -> str:
    return FENCED.sub("", text)


def test_pages_are_current(tool: ModuleType) -> None:
    assert tool.stale_pages(tool.make_pages(), API) == [], "run `make docs`"


def test_check_names_the_stale_pages(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--folder", str(tmp_path)]
    assert tool.main(options) == 0
    assert tool.main([*options, "--check"]) == 0
    (tmp_path / "config.md").write_text("edited by hand")
    (tmp_path / "errors.md").unlink()
    (tmp_path / "left_over.md").write_text("of a page that is gone")
    capsys.readouterr()
    assert tool.main([*options, "--check"]) == 1
    said = capsys.readouterr().err
    assert re.findall(r"(\w+\.md)", said) == ["config.md", "errors.md", "left_over.md"]
    assert (tmp_path / "config.md").read_text() == "edited by hand"
    assert tool.main(options) == 0
    assert tool.main([*options, "--check"]) == 0


def test_every_public_name_is_on_exactly_one_page(anchors: Counter[str]) -> None:
    names = set(public_names())
    assert {"LLMDataDist.init", "CacheKey.cluster_id", "LLMRole.Prompt", "MemInfo.addr", "PeerLost"} <= names
    assert sorted(name for name in names if anchors[name] == 0) == [], "not documented: add a directive for it"
    assert sorted(name for name, times in anchors.items() if times > 1) == []


def test_nothing_is_documented_that_is_not_there(anchors: Counter[str], tool: ModuleType) -> None:
    intros = {page: (API / "_intro" / page).read_text(encoding="utf-8") for page in PAGES}
    assert sorted(set(anchors) - set(tool.Inventory(intros).entries)) == []


def test_every_public_name_says_what_it_is(tool: ModuleType) -> None:
    silent = []
    for cls in (target for target in DESCRIBED if inspect.isclass(target)):
        entries = tool.entries_of(cls, "")
        silent += [entry.name for entry in entries if not entry.summary and not entry.name.startswith("DataType.DT_")]
    assert silent == [], "these need a docstring, or a line in the section Attributes or Args of their class"


def test_status_codes_that_are_only_kept_are_not_used_and_the_others_are() -> None:
    sources = [path for path in (ROOT / "datadist_core").rglob("*.py") if "tests" not in path.parts]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.name != "types.py")
    used = set(re.findall(r"LLMStatusCode\.(LLM_\w+)", text))
    about = inspect.getdoc(datadist_core.LLMStatusCode)
    kept = set(re.findall(r"(LLM_\w+): kept for scripts", about))
    assert used.isdisjoint(kept)
    assert used | kept == set(datadist_core.LLMStatusCode.__members__)


@pytest.mark.parametrize("page", PAGES)
def test_no_machine_specific_text(page: str) -> None:
    text = (API / page).read_text(encoding="utf-8")
    assert re.findall(r"object at 0x\w+|<class |<function |<factory>|/home/|/usr/|site-packages", text) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_page_can_be_found_and_begins_with_an_example(page: str) -> None:
    assert f"]({page})" in (API / "README.md").read_text(encoding="utf-8")
    assert f"(api/{page})" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert examples(page), "every page has an example"


@pytest.mark.parametrize("file", READERS_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    links = [link for link in LINK.findall(outside_code(file.read_text(encoding="utf-8"))) if "://" not in link]
    assert [link for link in links if not leads_somewhere(file, link)] == []


def leads_somewhere(file: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (file.parent / path).resolve() if path else file
    if not target.exists():
        return False
    return not anchor or anchor in anchors_of(target.read_text(encoding="utf-8"))


def anchors_of(text: str) -> set[str]:
    """Explicit ones, and those that are made of headings."""
    headings = re.findall(r"^#+ (.*)$", outside_code(text), re.MULTILINE)
    return {*ANCHOR.findall(text), *(re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings)}


def test_dead_links_are_noticed() -> None:
    here = API / "README.md"
    assert leads_somewhere(here, "config.md")
    assert leads_somewhere(here, "config.md#LLMConfig.device_id")
    assert leads_somewhere(here, "../../README.md#two-commands")
    assert not leads_somewhere(here, "config.md#LLMConfig.no_such_option")
    assert not leads_somewhere(here, "no_such_page.md")


def examples(page: str, kind: str = "python") -> list[str]:
    text = (API / page).read_text(encoding="utf-8")
    return [code for info, code in FENCED.findall(text) if info == kind]


def test_examples_run() -> None:
    run({page: examples(page) for page in PAGES})


@pytest.mark.slow
def test_examples_with_torch_run() -> None:
    pytest.importorskip("torch")
    pages = [page for page in PAGES if examples(page, "python torch")]
    assert pages == ["views.md"]
    run({page: examples(page) + examples(page, "python torch") for page in pages})


def run(blocks_by_page: dict[str, list[str]]) -> None:
    """Each page's blocks one after the other, in a namespace of its own; all pages in one process (it takes a while to
    start one), which is not this one: what examples leave behind, or install in sys.modules, ends with it."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps({page: "\n".join(blocks) for page, blocks in blocks_by_page.items()}),
        text=True,
        cwd=ROOT,
        capture_output=True,
        timeout=EXAMPLES_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


def test_example_that_fails_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r'File "config\.md", line 2'):
        run({"config.md": ["x = 1", "assert x == 2"]})
