"""NeMo RL's loss package without the experiment trackers that its logger imports.

The logger imports mlflow and swanlab, which no loss reads. Where they are missing, stubs without content stand in.
"""

import importlib.machinery
import importlib.util
import sys
import types

for _name in ("mlflow", "swanlab"):
    if importlib.util.find_spec(_name) is None:
        _stub = types.ModuleType(_name)
        _stub.__spec__ = importlib.machinery.ModuleSpec(_name, None)
        sys.modules[_name] = _stub
