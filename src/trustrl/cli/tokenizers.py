"""The tokenizer of a model that the command line names."""

from typing import Any

from trustrl.errors import ConfigError


def tokenizer_of(option: str, name: str) -> Any:
    """The tokenizer of a known model, of a folder or of a hub id.

    Raises:
        ConfigError: it cannot be loaded.
        UnknownNameError: the name is none of these.
        MissingPackageError: transformers is not installed.
    """
    from trustrl import models
    from trustrl.packages import need

    auto = need("transformers", extra="models").AutoTokenizer
    where = models.path(name)
    try:
        return auto.from_pretrained(where)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{option} must be a model's name or folder, got {name!r}: {first}") from None
