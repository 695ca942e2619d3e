"""An engine that is not installed is named, with what installs it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("engine", "advice"), [("trl", "trustrl[trl]"), ("verl", "trustrl[verl]"), ("skyrl", "SkyRL 0.3")]
)
def test_an_import_names_the_missing_engine(engine, advice):
    """In a process of its own: other tests put stubs in the place of engines."""
    code = (
        "import importlib.util, sys\n"
        f"if importlib.util.find_spec({engine!r}) is not None: sys.exit(3)\n"
        f"import trustrl.engines.{engine}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip(f"{engine} is installed")
    assert f"{engine} is not installed." in done.stderr
    assert advice in done.stderr
