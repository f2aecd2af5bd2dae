"""FolderStore: objects in a folder of this machine, without further packages; for what a worker keeps for itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.links.manifest import Store, check_size


class FolderStore(Store):
    """Files below a folder, each written whole or not at all.

    Args:
        folder: made where it is not there.
    """

    def __init__(self, folder: str | Path):
        """Make the folder."""
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise ConfigError(f"cannot make the folder {folder}: {cause.strerror or cause}") from cause

    def create(self, key: str, data: bytes) -> bool:
        """Write a file where there is none."""
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(part, path)
        except FileExistsError:
            return path.read_bytes() == data
        finally:
            part.unlink(missing_ok=True)
        return True

    def get(self, key: str, *, most: int) -> bytes | None:
        """The bytes of a file."""
        try:
            with (self.folder / key).open("rb") as file:
                data = file.read(most + 1)
        except FileNotFoundError:
            return None
        check_size(key, len(data), most)
        return data

    def list(self, prefix: str) -> dict[str, int]:
        """Names of the files in a folder and their sizes."""
        folder = self.folder / prefix
        if not folder.is_dir():
            return {}
        with os.scandir(folder) as found:
            return {e.name: e.stat().st_size for e in sorted(found, key=lambda e: e.name) if not e.name.endswith(".part")}

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files."""
        for key in keys:
            (self.folder / key).unlink(missing_ok=True)
