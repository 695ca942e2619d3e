"""The recipes that come with trustrl, by name: `tour` is `recipes/tour.toml` of a checkout, and is in every wheel."""

from pathlib import Path

from trustrl.errors import UnknownNameError
from trustrl.packages import shipped_folder
from trustrl.registry import nearest


def shipped() -> dict[str, Path]:
    """The file of every recipe, by name."""
    return {file.stem: file for file in sorted(shipped_folder("recipes").glob("*.toml"))}


def named(name: str) -> Path:
    """The file of one of them.

    Raises:
        UnknownNameError: none has that name.
    """
    known = shipped()
    if name not in known:
        raise UnknownNameError(
            f"A recipe must be a file that ends with .toml, or a name, got {name!r}.{nearest(name, list(known))} "
            f"Known: {', '.join(known)}."
        )
    return known[name]


def file_of(recipe: str | Path) -> Path:
    """The file of a recipe: a path has a slash or ends with .toml, anything else is a name.

    Raises:
        UnknownNameError: it is a name, and no recipe has it.
    """
    path = Path(recipe)
    is_path = path.suffix == ".toml" or path.name != str(recipe)
    return path if is_path else named(path.name)


def about(file: Path) -> str:
    """What a recipe is: the comment that is its first line."""
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
