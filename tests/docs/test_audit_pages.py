"""The pages about tools that read runs: every command parses, every key of audits and calibrations is listed."""

import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from support import recorded
from trustrl.cli import main, parser_of

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / f"docs/guides/{name}.md" for name in ("audit", "calibrate")]
REFERENCE = ROOT / "docs/reference/audit.md"
COMMANDS = [
    command
    for page in (*GUIDES, *(ROOT / f"docs/guides/{name}.md" for name in ("report", "watch", "explain")))
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
    _, audit, calibrate = re.split(r"^## ", REFERENCE.read_text(), flags=re.M)
    listed = set(re.findall(r"`(\w+)`", {"audit": audit, "calibrate": calibrate}[verb]))
    inner = found["regions"]["ppo"] if verb == "audit" else found["statistics"]["tv"]
    for key in (*found, *inner):
        assert key in listed, key


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_pasted_output_fits_a_terminal(page):
    for block in re.findall(r"^```text\n(.*?)^```", page.read_text(), re.M | re.S):
        assert max(map(len, block.splitlines())) <= 100
