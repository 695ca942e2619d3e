"""Registry that third parties can extend: it refuses to overwrite, and suggests the nearest name."""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Generic, TypeVar

from trustrl.errors import DuplicateNameError, UnknownNameError

T = TypeVar("T")


def nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """Returns ` Did you mean 'x'?`, or an empty string if no known name is similar."""
    near = get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class Registry(Mapping[str, T], Generic[T]):
    """Mapping that is read-only except through `register`.

    Example:
        >>> shapes = Registry("shape")
        >>> _ = shapes.register("square")(4)
        >>> shapes["square"]
        4
        >>> shapes["sqare"]
        Traceback (most recent call last):
        ...
        trustrl.errors.UnknownNameError: Unknown shape 'sqare'. Did you mean 'square'? Known: square.
    """

    def __init__(self, what: str, discover: Callable[[], None] | None = None) -> None:
        """Creates an empty registry.

        Args:
            what: Kind of entry, for errors.
            discover: Registers the entries of other packages. It is called once: when a name is sought that is not
                known otherwise, or when the names are listed.
        """
        self._what = what
        self._entries: dict[str, T] = {}
        self._discover = discover

    def _complete(self) -> dict[str, T]:
        """Returns all entries, those of other packages included."""
        if self._discover is not None:
            discover, self._discover = self._discover, None
            discover()
        return self._entries

    def register(self, name: str) -> Callable[[T], T]:
        """Returns a decorator that registers its argument under `name`.

        Raises:
            DuplicateNameError: If `name` is already registered.
        """

        def add(entry: T) -> T:
            if name in self._entries:
                raise DuplicateNameError(
                    f"{self._what} {name!r} is already registered as {self._entries[name]!r}. "
                    f"Choose another name for {entry!r}."
                )
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name]
        try:
            return self._complete()[name]
        except KeyError:
            known = ", ".join(sorted(self._entries))
            raise UnknownNameError(
                f"Unknown {self._what} {name!r}.{nearest(name, self._entries)} Known: {known}."
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._complete())

    def __len__(self) -> int:
        return len(self._complete())

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._complete()
