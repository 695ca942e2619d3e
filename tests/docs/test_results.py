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
    ["answers.py"], ["clipping.py", "page"], ["smollm2_masks.py", "page"], ["smollm2_clipping.py", "page"],
    ["smollm2_mismatch.py", "page"], ["smollm2_prefill.py", "page"], ["moe_mismatch.py", "page"],
    ["explained.py", "page"], ["proxies.py", "page"], ["smollm2_same_tokens.py", "page"],
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_pages_are_what_their_command_writes(tmp_path, command):
    for folder in ("benchmarks/evidence", "docs", "recipes/evidence"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "README.md", tmp_path)  # has one of the tables
    script, *rest = command
    done = subprocess.run(
        [sys.executable, str(tmp_path / "benchmarks/evidence" / script), *rest],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert len(pages) > 1
    for page in pages:
        assert (tmp_path / page.relative_to(ROOT)).read_text() == page.read_text(), page.name
