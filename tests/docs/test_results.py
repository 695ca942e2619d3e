"""Every number on a page of results follows from the committed data: the commands write the same pages again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
COMMANDS = [
    ["01-which-region-wins/answers.py"], ["01-which-region-wins/clipping.py", "page"],
    ["03-which-tokens-masked/smollm2_masks.py", "page"], ["03-which-tokens-masked/smollm2_clipping.py", "page"],
    ["04-why-mismatch/smollm2_mismatch.py", "page"], ["04-why-mismatch/smollm2_prefill.py", "page"],
    ["04-why-mismatch/moe_mismatch.py", "page"], ["06-fault-found/explained.py", "page"],
    ["06-fault-found/found_faults.py", "page"],
    ["05-which-statistic/proxies.py", "page"], ["04-why-mismatch/smollm2_same_tokens.py", "page"],
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(command[0]).name)
def test_the_pages_are_what_their_command_writes(tmp_path, command):
    for folder in ("studies", "docs", "recipes/evidence"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "README.md", tmp_path)  # has one of the tables
    script, *rest = command
    done = subprocess.run(
        [sys.executable, str(tmp_path / "studies" / script), *rest],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert len(pages) > 1
    for page in pages:
        assert (tmp_path / page.relative_to(ROOT)).read_text() == page.read_text(), page.name
