"""Numbers of value formats and index codes on the wire: what a part of a message says about itself."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from thinwire.errors import ConfigError


class Registry:
    """Items and their numbers, each once.

    Args:
        what: what the items are, for error messages.
        limit: numbers are below this.
    """

    def __init__(self, what: str, limit: int):
        self.what, self.limit = what, limit
        self._numbers: dict[Hashable, int] = {}

    def add(self, number: int, item: Hashable) -> None:
        """Give an item its number, before the first message is made.

        Raises:
            ConfigError: a number or an item that is there already, or a number out of range.
        """
        if not 0 <= number < self.limit:
            raise ConfigError(f"the number of a {self.what} is 0 to {self.limit - 1}, got {number!r}")
        for known, taken in self._numbers.items():
            if taken == number or known == item:
                raise ConfigError(f"{self.what} {number} cannot be {item!r}: {known!r} has the number {taken}")
        self._numbers[item] = number

    def number(self, item: Hashable, default: int | None = None) -> int:
        """The number of an item, or `default` where it has none.

        Raises:
            ConfigError: an item without a number, where no default is given.
        """
        found = self._numbers.get(item, default)
        if found is None:
            raise ConfigError(f"{item!r} has no number as a {self.what}; give it one with Registry.add")
        return found

    def items(self) -> Iterator[tuple[int, Hashable]]:
        """Numbers and items, by number."""
        return iter(sorted((number, item) for item, number in self._numbers.items()))


VALUE_FORMATS = Registry("value format", 1 << 16)  # 0 is a format that has no number: the fingerprint alone tells it
INDEX_CODES = Registry("index code", 16)
