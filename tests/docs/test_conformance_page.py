"""The pages of conformance results are what its command makes from the committed data, and names every version."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/results/losses.md", "docs/results/losses-tables.md")
DATA = json.loads((ROOT / "docs/data/conformance.json").read_text())


@pytest.fixture
def copy(tmp_path):
    """The script, its data and its page in another folder."""
    for name in (
        "studies/11-losses-conform/conformance.py", "studies/shared/pages.py", "docs/data/conformance.json", *PAGES,
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def fill(folder):
    subprocess.run([sys.executable, str(folder / "studies/11-losses-conform/conformance.py"), "page"], check=True)
    return [(folder / page).read_text() for page in PAGES]


def test_the_page_is_made_from_the_data(copy):
    assert fill(copy) == [(ROOT / page).read_text() for page in PAGES]


def test_other_data_make_another_page(copy):
    data = json.loads(json.dumps(DATA))
    data["verl"]["losses"][0]["groups"]["invariants"] = {"passes": 1, "fails": 98}
    (copy / "docs/data/conformance.json").write_text(json.dumps(data))
    assert "1 of 99, [98 fail](#what-fails)" in fill(copy)[1]


def test_the_groups_of_each_loss_add_up_to_its_counts():
    for found in DATA.values():
        for loss in found["losses"]:
            for verdict, num in loss["counts"].items():
                assert sum(group.get(verdict, 0) for group in loss["groups"].values()) == num
            listed = [row["verdict"] for row in loss["results"]]
            assert listed.count("fails") == loss["counts"].get("fails", 0)


def test_every_engine_has_a_row_with_its_version():
    page, tables = ((ROOT / name).read_text() for name in PAGES)
    assert set(DATA) == {"trustrl", "trl", "verl", "skyrl", "openrlhf", "areal", "rlinf", "torchtune"}
    for package, found in DATA.items():
        assert tables.count(f"| {package} {found['version']} |") == len(found["losses"]) > 0
        assert f"| {package} {found['version']} | {len(found['losses'])} |" in page
