"""A stranger's data on verl: `main_ppo` on Ray with a JSONL file and a reward function."""

import sys

import pytest

pytest.importorskip("verl")
pytest.importorskip("pyarrow")

from support import stranger
from support.tiny_models import save_model
from support.verl_cpu_runs import said
from trustrl.engines.common.seam import version_of

pytestmark = pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")


@pytest.mark.xdist_group("own data")
def test_a_jsonl_file_and_a_function_of_ten_lines_are_trained_on(tmp_path, monkeypatch):
    save_model(tmp_path / "model", tied=True)
    rows = stranger.write(tmp_path, model=tmp_path / "model", engine="verl")
    monkeypatch.chdir(tmp_path)
    code, output = said([sys.executable, "-m", "trustrl.cli", "run", "mine.toml", "--out", "run"])
    assert code == 0, output[-6000:]
    stranger.check_run(tmp_path / "run", tmp_path, rows)
