"""The pages about tools that read runs: every command parses, every key of audits and calibrations is listed."""

import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import bound_pairs

from support import recorded
from trustrl.cli import main, parser_of

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / f"docs/guides/{name}.md" for name in ("audit", "choosing-delta", "bound")]
COMMANDS = [
    command
    for page in (*GUIDES, *(ROOT / f"docs/guides/{name}.md" for name in ("report", "explain")))
    for command in re.findall(r"^(?:\$ )?trustrl (.+)$", page.read_text().replace("\\\n", ""), re.M)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_in_the_guides_parses(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    verb, *rest = shlex.split(command)
    options = parser_of(verb).parse_intermixed_args(rest)
    if verb == "run":  # what a plan accepts, a run of the same recipe and settings begins with
        assert main(["plan", options.recipe, *options.settings]) == 0


@pytest.mark.parametrize("verb", ["audit", "calibrate"])
def test_the_reference_lists_every_key(verb, tmp_path, capsys):
    recorded.record(tmp_path)
    main([verb, str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    _, audit, calibrate = re.split(r"^### ", GUIDES[0].read_text(), flags=re.M)
    listed = set(re.findall(r"`(\w+)`", {"audit": audit, "calibrate": calibrate}[verb]))
    inner = found["regions"]["ppo"] if verb == "audit" else found["statistics"]["tv"]
    for key in (*found, *inner):
        assert key in listed, key


def test_the_guide_to_the_bound_lists_every_key(tmp_path, capsys):
    recorded.add_rewards(recorded.record(tmp_path))
    assert main(["bound", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    listed = set(re.findall(r"`(\w+)`", GUIDES[-1].read_text().partition("\n## JSON\n")[2]))
    update = found["updates"][0]
    for key in (*found, *found["ball"], *update, *update["published"], *update["published"]["positive_below"]):
        assert key in listed, key


def test_the_page_of_the_bound_has_the_figures_of_the_enumeration():
    """Of fewer pairs, drawn alike: shares within a tenth, and every 0 is 0."""
    page = (ROOT / "docs/concepts/reductions.md").read_text()
    rows = {name: int(num.replace(",", "")) for name, num in re.findall(r"^\| (.+?) \| ([\d,]+) \|$", page, re.M)}
    found = bound_pairs.counted(200, 0)
    for name, key in {
        "identity wrong by more than 1e-12": "identity off by 1e-12",
        "change below L′ − max form": "violated: max form",
        "change below L′ − sum form": "violated: sum form",
        "change below the bound with ξ as half of the range": "violated: half range",
        "change below L′ − ξT(T−1)·max KL(π‖μ)": "violated: KL ball",
        "bound positive": "positive",
        "bound positive with ξ as half of the range": "positive: half range",
        "control: change below L′ − 0.1 · penalty": "control: penalty x 0.1",
        "control: change below the bound for the exchanged pair": "control: exchanged",
        "exchanged throughout: J(μ) − J(π) below the bound for (π, μ)": "violated: J(μ) − J(π), all exchanged",
    }.items():
        assert 5 * found[key] == pytest.approx(rows[name], rel=0.1), name


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_pasted_output_fits_a_terminal(page):
    for block in re.findall(r"^```text\n(.*?)^```", page.read_text(), re.M | re.S):
        assert max(map(len, block.splitlines())) <= 100
