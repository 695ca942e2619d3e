"""Documentation that cannot go stale: every block runs, every link leads somewhere, tables match the code."""

import ast
import re
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import trustrl
from trustrl.core.metrics import CORE, METRICS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
SECTIONS = [
    "Equation", "When to use it", "Configuration", "Results", "In code", "In other libraries", "Reference",
]  # fmt: skip


def ids(paths):
    return [str(p.relative_to(ROOT)) for p in paths]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=ids(p for p in PAGES if blocks(p)))
def test_every_block_runs(page):
    if page.parent.name == "engines":  # runs in that engine's environment
        pytest.importorskip(page.stem.replace("-", "_"))
    warnings.filterwarnings("ignore", ".* masked no token in the first batch")  # a page's runs are a few steps long
    namespace = {"__name__": "docs"}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("file", sorted(ROOT.glob("src/trustrl/**/*.py")), ids=lambda file: file.stem)
def test_no_message_names_a_file_of_the_documentation(file):
    """The wheel does not contain docs/; docstrings may name pages, messages name commands or titles of pages."""
    tree = ast.parse(file.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [one.value for one in texts if id(one) not in docstrings and "docs/" in one.value] == []


def test_every_page_that_the_code_names_is_there():
    named = {page for file in ROOT.glob("src/**/*.py") for page in re.findall(r"docs/[\w/.-]+\.md", file.read_text())}
    assert named
    assert not {page for page in named if not (ROOT / page).exists()}


OWN_MACHINE = re.compile(r"localhost|\.local$|^(?:127|10|192\.168)\.|^\[|^[^.]+$")


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_outside_links_are_encrypted_and_lead_to_no_machine_of_ours(page):
    for target in re.findall(r"\]\(([a-z]+:[^)]+)\)", page.read_text()):
        assert target.startswith("https://"), target
        assert not OWN_MACHINE.search(urlsplit(target).netloc), target


def test_the_python_reference_lists_every_public_name_once():
    page = (ROOT / "docs/reference/api.md").read_text()
    listed = re.findall(r"^::: trustrl\.(regions\.\w+|\w+)$", page, re.M)
    settings = (f"regions.{name}" for name in trustrl.regions.__all__)
    assert sorted(listed) == sorted({*trustrl.__all__, *settings} - {"__version__", "regions"})


ALGORITHMS = [ROOT / f"docs/algorithms/{name}.md" for name in ("dppo", "troll", "ppo")]  # the others are generated


@pytest.mark.parametrize("page", ALGORITHMS, ids=ids(ALGORITHMS))
def test_algorithm_pages_share_one_order(page):
    assert re.findall(r"^## (.+)$", page.read_text(), re.M) == SECTIONS
    assert len(page.read_text().split()) <= 1200


def test_every_preset_has_a_page():
    text = (ROOT / "docs/algorithms/index.md").read_text()
    assert [name for name in trustrl.presets() if f"`{name}`" not in text] == []


def test_the_metric_page_lists_the_core_metrics():
    (table,) = re.findall(
        r"<!-- begin core -->(.*?)<!-- end core -->", (ROOT / "docs/reference/metrics.md").read_text(), re.S
    )
    assert tuple(re.findall(r"^\| `trustrl/(\w+)`", table, re.M)) == CORE


def test_the_metric_page_matches_the_dictionary():
    page = (ROOT / "docs/reference/metrics.md").read_text()
    listed = set(re.findall(r"`trustrl/([\w.\-]+)`", page))
    assert listed == {m.name for m in METRICS}
    for metric in METRICS:
        assert metric.formula.replace("|", "\\|") in page, metric.name


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_pages_name_only_metrics_that_exist(page):
    """Anything in backticks or quotes that looks like a metric is one, or is the example region's own."""
    # Not of the loss: checks of the sampler make them.
    of_checks = {"decode_prefill_gap", "decode_prefill_gap_max", "stale_replicas", "replica_gap_max"}
    known = {m.name for m in METRICS} | of_checks | {"band_rise", "<name>", "..."}
    for name in re.findall(r"[`\"\']trustrl/([^`\"\'\s]+)[`\"\']", page.read_text()):
        assert name in known or "{" in name or name.startswith("arithmetic/"), name  # a task's name in a record


def test_ci_runs_every_session_that_nox_runs_unasked():
    asked = re.findall(
        r'^ +(?:run (\w+) |side_by_side "([a-z_ ]+)" "([a-z_ ]+)")', (ROOT / ".ci/run").read_text(), re.M
    )
    (unasked,) = re.findall(r"nox\.options\.sessions = \[(.*?)\]", (ROOT / "noxfile.py").read_text(), re.S)
    assert sorted(" ".join(map(" ".join, asked)).split()) == sorted(re.findall(r'"(\w+)"', unasked))
