"""Every script that a page names is there, or the table of old paths in studies/README.md has its new place."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUDIES = sorted(folder for folder in (ROOT / "studies").glob("[0-9]*") if folder.is_dir())
OVERVIEW = (ROOT / "studies/README.md").read_text()
MOVED = dict(re.findall(r"^\| `(benchmarks/\S+)` \| `(studies/\S+)` \|$", OVERVIEW, re.M))
NOTEBOOKS_AND_DATA = {".md", ".ipynb", ".json", ".jsonl"}
PAGES = [
    *sorted(page for page in (ROOT / "docs").rglob("*") if page.suffix in NOTEBOOKS_AND_DATA),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "noxfile.py", "pyproject.toml")),
    *sorted((ROOT / "recipes").rglob("*.toml")), *sorted((ROOT / "benchmarks").rglob("*.py")),
    *sorted((ROOT / "studies").rglob("*.py")), *(folder / "README.md" for folder in STUDIES),
]  # fmt: skip


def named(folder):
    """Files of a folder that pages name, with the pages."""
    pattern = re.compile(rf"\b{folder}/[\w/.-]*\.(?:py|c|txt|md)\b")
    found = {}
    for page in PAGES:
        for path in pattern.findall(page.read_text()):
            found.setdefault(path, []).append(str(page.relative_to(ROOT)))
    return found


def test_every_benchmark_that_a_page_names_exists_or_has_a_new_place():
    found = named("benchmarks")
    assert "benchmarks/evidence2/run.py" in found  # the registration of the second study keeps its paths
    assert {path: pages for path, pages in found.items() if not (ROOT / path).exists() and path not in MOVED} == {}


def test_every_file_of_a_study_that_a_page_names_exists():
    found = named("studies")
    assert len(found) > 30
    assert {path: pages for path, pages in found.items() if not (ROOT / path).exists()} == {}


def test_only_registrations_name_old_paths():
    stale = {page for path, pages in named("benchmarks").items() if path in MOVED for page in pages}
    assert stale == {"docs/results/registration-2.md"}


def test_every_new_place_is_a_file_and_no_old_one_is():
    assert len(MOVED) == OVERVIEW.count("| `benchmarks/") == len(set(MOVED.values()))
    assert [new for new in MOVED.values() if not (ROOT / new).is_file()] == []
    assert [old for old in MOVED if (ROOT / old).exists()] == []


def test_the_overview_lists_every_study_in_order():
    listed = re.findall(
        r"^\| \[([\w-]+)\]\(\1/README\.md\) \| (.+\?) \| \[.+\]\(\.\./(docs/.+\.md)\) \|$", OVERVIEW, re.M
    )
    assert [name for name, *_ in listed] == [folder.name for folder in STUDIES]
    for name, question, page in listed:
        text = (ROOT / "studies" / name / "README.md").read_text()
        assert text.startswith(f"# {question}\n"), name
        assert f"`{page}`" in text, name
        assert (ROOT / page).exists(), page


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_a_study_s_readme_is_short_and_has_a_command(folder):
    text = (folder / "README.md").read_text()
    assert text.count("\n") <= 25
    assert re.search(rf"nox -s (?:results -- {folder.name}|failures)\b|python studies/{folder.name}/", text)


def test_nox_writes_pages_with_scripts_that_exist():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    (table,) = (x.value for x in tree.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "RESULTS")
    results = ast.literal_eval(table)
    for name, commands in results.items():
        for command in commands:
            assert (ROOT / "studies" / name / command.split()[0]).is_file(), command
    asked = re.findall(r"nox -s results -- (\S+)", "".join((folder / "README.md").read_text() for folder in STUDIES))
    assert set(asked) == set(results)


def local_modules(folder):
    return {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}


@pytest.mark.parametrize("script", sorted((ROOT / "studies").rglob("*.py")), ids=lambda path: path.name)
def test_a_script_imports_only_modules_of_its_study_and_of_folders_that_it_names(script):
    source = script.read_text()
    tree = ast.parse(source)
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        )
    }  # fmt: skip
    folders = {path for path in (ROOT / "studies").iterdir() if path.is_dir()}
    own = {folder for folder in folders if folder in script.parents}
    others = {folder for folder in folders - own if f'"{folder.name}"' in source}
    within = set().union(*(local_modules(folder) for folder in own | others))
    elsewhere = set().union(*(local_modules(folder) for folder in folders)) - within
    assert imported & elsewhere == set()
