"""On PYTHONPATH, this lets Python 3.11 import SkyRL 0.3: pydantic refuses its `typing.TypedDict` before 3.12."""

import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict
