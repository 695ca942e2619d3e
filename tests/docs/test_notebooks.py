"""Notebooks that cannot go stale: each runs from top to bottom, asserts its own numbers, and is committed clean.

Running them needs a kernel and, for one, SmolLM2: `nox -s real_model`. The other tests read the files alone.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from notebook_pages import page_of
from set_repository import HOST, PLACEHOLDER

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "notebooks"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NEEDS = {"dppo-and-troll-on-a-real-model": "gguf"}
WITHOUT_PICTURES = ("your-own-data",)
LARGEST = 400_000  # bytes, pictures included

every_notebook = pytest.mark.parametrize("file", NOTEBOOKS, ids=[file.stem for file in NOTEBOOKS])


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def code_cells(file):
    return [cell for cell in read(file)["cells"] if cell["cell_type"] == "code"]


def texts(value):
    """Every string anywhere in a notebook but the pictures."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name != "image/png":
                yield from texts(item)


def test_all_notebooks_are_there():
    assert [file.stem for file in NOTEBOOKS] == [
        "dppo-and-troll-on-a-real-model", "why-did-my-run-collapse", "why-the-clip-is-the-wrong-shape", "your-own-data",
    ]  # fmt: skip


@every_notebook
def test_the_first_cell_installs_with_extras_that_exist(file):
    first = "".join(code_cells(file)[0]["source"])
    (extras,) = re.findall(r'^    %pip install --quiet "trustrl\[([\w,]+)\]"$', first, re.M)
    assert set(extras.split(",")) <= set(EXTRAS)
    assert code_cells(file)[0]["outputs"] == []


@every_notebook
def test_a_page_opens_in_colab_once_the_address_is_set(file):
    pictured = "![Open in Colab](../assets/open-in-colab.svg)"
    assert pictured not in page_of(file, f"{HOST}{PLACEHOLDER}/trustrl")[0]
    target = f"https://colab.research.google.com/github/someone/trustrl/blob/main/docs/notebooks/{file.name}"
    assert f"[{pictured}]({target})" in page_of(file, f"{HOST}someone/trustrl")[0]
    assert (FOLDER.parent / "assets/open-in-colab.svg").is_file()


@pytest.fixture(scope="module")
def fonts(tmp_path_factory):
    """A cache of matplotlib's own: the user's may name fonts of an installation that is gone, and making one talks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], check=False, capture_output=True)
        yield


@every_notebook
def test_a_notebook_runs_from_top_to_bottom(file, fonts):
    pytest.importorskip("nbclient", reason="needs the dependency group `notebooks`; run by `nox -s real_model`")
    pytest.importorskip(NEEDS.get(file.stem, "matplotlib"), reason="needs a real model; run by `nox -s real_model`")
    import run_notebooks

    again = run_notebooks.executed(file)
    cells = [cell for cell in again.cells if cell.cell_type == "code"]
    assert not [output.text for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    assert list(map(pictures, cells)) == list(map(pictures, code_cells(file)))


def pictures(cell):
    return sum("image/png" in output.get("data", {}) for output in cell["outputs"])


@every_notebook
def test_a_notebook_is_committed_with_its_outputs_in_order(file):
    cells = code_cells(file)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert all(output["name"] == "stdout" for output in outputs if output["output_type"] == "stream")
    assert sum(map(pictures, cells)) >= (0 if file.stem in WITHOUT_PICTURES else 2)
    assert file.stat().st_size < LARGEST


@every_notebook
def test_a_notebook_asserts_what_it_says(file):
    """Numbers in the text may not drift from what the cells compute."""
    assert sum(cell["source"].count("assert") for cell in map(joined, code_cells(file))) >= 8


def joined(cell):
    return {**cell, "source": "".join(cell["source"])}


@every_notebook
def test_nothing_in_a_notebook_tells_where_it_ran(file):
    found = read(file)
    assert found["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert not any(cell["metadata"] for cell in found["cells"])
    for text in texts(found):
        absolute = re.search(r"(?<![\w./:])(?:/(?:home|root|tmp|work|usr|opt|mnt|var|Users)\b|[A-Z]:\\)\S*|~/", text)
        assert absolute is None, absolute


@every_notebook
def test_every_relative_link_of_a_notebook_leads_somewhere(file):
    for cell in read(file)["cells"]:
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", "".join(cell["source"])):
                assert target.startswith("https://") or (FOLDER / target).exists(), target
