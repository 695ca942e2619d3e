"""Address of the repository: `Repository` in pyproject.toml is the variable, and other files repeat it.

python scripts/set_repository.py NAME/trustrl    # write this address in every file
python scripts/set_repository.py --check         # fail while the address is a placeholder, or if files disagree
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOST = "https://github.com/"
PLACEHOLDER = "OWNER"
FOLDERS = (".github", "docs", "launch", "packages", "recipes", "src", "studies", "tests", "upstream")
KINDS = {".cff", ".ipynb", ".md", ".py", ".toml", ".yml"}
ADDRESS = re.compile(rf"{re.escape(HOST)}[\w.-]+/trustrl(?![\w-])")


def current(root: Path = ROOT) -> str:
    """Returns the address in pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def files(root: Path = ROOT) -> Iterator[Path]:
    """Yields every file that may have the address."""
    yield from (file for file in sorted(root.iterdir()) if file.suffix in KINDS)
    for folder in FOLDERS:
        yield from (file for file in sorted((root / folder).rglob("*")) if file.suffix in KINDS and file.is_file())


def other_addresses(root: Path = ROOT) -> list[tuple[str, str]]:
    """Returns each file with an address of this repository that is not the one in pyproject.toml."""
    allowed = current(root)
    return [
        (str(file.relative_to(root)), address)
        for file in files(root)
        for address in ADDRESS.findall(file.read_text(encoding="utf-8"))
        if address != allowed
    ]


def write(name: str, root: Path = ROOT) -> list[str]:
    """Writes the address of `name`, such as "someone/trustrl", in every file, and returns the files that changed."""
    if not re.fullmatch(r"[\w.-]+/trustrl", name):
        raise SystemExit(f"The repository must be OWNER/trustrl, got {name!r}.")
    changed = []
    for file in files(root):
        text = file.read_text(encoding="utf-8")
        new = ADDRESS.sub(HOST + name, text)
        if new != text:
            file.write_text(new, encoding="utf-8")
            changed.append(str(file.relative_to(root)))
    return changed


def problems(root: Path = ROOT) -> list[str]:
    """Returns the reasons not to release with the present addresses."""
    unset = [f"{current(root)} is a placeholder."] if f"/{PLACEHOLDER}/" in current(root) else []
    return [*unset, *(f"{file} has {address}." for file, address in other_addresses(root))]


def main() -> None:
    """Writes the address, or checks it."""
    match sys.argv[1:]:
        case ["--check"]:
            if found := problems():
                raise SystemExit("\n".join([*found, "Run `python scripts/set_repository.py NAME/trustrl`."]))
        case [name]:
            print("\n".join(write(name)) or "nothing changed")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
