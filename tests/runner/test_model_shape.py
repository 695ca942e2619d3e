"""Sizes of a model from its files: headers alone are read, whatever the size of the weights."""

import json
import os

import pytest

from trustrl.errors import ConfigError
from trustrl.runner.model_shape import shape_of
from trustrl.runner.recipe_tables import Model


def model(folder, header, size=None):
    """A folder with a configuration and one safetensors file, whose tensors are a hole in the file."""
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "vocab_size": 16}))
    file, text = folder / "model.safetensors", json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    if size is not None:
        os.truncate(file, size)
    return Model(name=str(folder))


def test_weights_of_40_gb_in_one_file_are_counted(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "a": {"shape": [16, 8]}, "b": {"shape": []}}
    found = shape_of(model(tmp_path, header, 40_000_000_000))
    assert (found.parameters, found.hidden_size, found.vocab_size) == (129, 8, 16)


@pytest.mark.parametrize("header", [[], {"a": {}}, {"a": 3}, {"a": {"shape": 3}}, {"a": {"shape": [-1, 8]}}])
def test_a_damaged_header_is_refused_in_a_sentence(tmp_path, header):
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        shape_of(model(tmp_path, header))
