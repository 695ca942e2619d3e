"""NeMo RL's loss package without the experiment trackers that its logger imports.

The logger imports mlflow and swanlab, which no loss reads. Where they are missing, stubs without content stand in.
"""

import importlib.machinery
import importlib.util
import sys
import types

_here = importlib.util.find_spec("nemo_rl") is not None  # elsewhere, tests of trackers must not find the stubs
for _name in ("mlflow", "swanlab"):
    if _here and importlib.util.find_spec(_name) is None:
        _stub = types.ModuleType(_name)
        _stub.__spec__ = importlib.machinery.ModuleSpec(_name, None)
        sys.modules[_name] = _stub
