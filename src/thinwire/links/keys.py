"""Ed25519 keys of workers and owners of runs, through `cryptography` (extra `thinwire[store]`).

A key is a file that only its user can read; others know its public half, one word of text: `ed25519:` and base64.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, MissingDependency, how_to_install
from thinwire.links.manifest import Signer

PREFIX = "ed25519:"
SIGNATURE = 64  # bytes
_MOST = 4096  # bytes of a key file


class PublicKey:
    """What others know of a key.

    Args:
        text: `ed25519:` and the 32 bytes in base64.
    """

    def __init__(self, text: str):
        """Refuse what is no key."""
        try:
            raw = base64.b64decode(text.removeprefix(PREFIX), validate=True)
            if not text.startswith(PREFIX) or len(raw) != 32:
                raise ValueError(text)
            self._key = _ed25519().Ed25519PublicKey.from_public_bytes(raw)
        except ValueError as error:
            raise ConfigError(
                f"a public key is {PREFIX} and 44 characters, as `thinwire keys new` prints it, got {text!r}"
            ) from error
        self.text = PREFIX + base64.b64encode(raw).decode()

    def __repr__(self) -> str:
        """As it is written."""
        return f"PublicKey({self.text!r})"

    def __eq__(self, other: object) -> bool:
        """Whether it is the same key."""
        return isinstance(other, PublicKey) and other.text == self.text

    def __hash__(self) -> int:
        """Of its text."""
        return hash(self.text)

    def verify(self, data: bytes, signature: bytes) -> bool:
        """Whether the owner of this key signed the data."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, data)
        except InvalidSignature:
            return False
        return True


class PrivateKey:
    """A worker's or an owner's own key: `PrivateKey.new()`, or `PrivateKey.read(path)`."""

    def __init__(self, key: Any):
        """Around a key of `cryptography`."""
        self._key = key

    @classmethod
    def new(cls) -> PrivateKey:
        """A key that nobody else has."""
        return cls(_ed25519().Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: str | Path) -> PrivateKey:
        """The key in a file that `write` made."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                mode, text = os.fstat(file.fileno()).st_mode & 0o777, file.read(_MOST + 1)
        except OSError as error:
            raise ConfigError(f"cannot read the key {path}: {error.strerror or error}") from error
        if mode & 0o077:
            raise ConfigError(f"others may read the key {path} (mode {mode:o}): chmod 600 {path}, or make a new one")
        _ed25519()
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(text[:_MOST], password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is not a key that `thinwire keys new` made") from error
        if not isinstance(key, _ed25519().Ed25519PrivateKey):
            raise ConfigError(f"{path} is not an Ed25519 key: make one with `thinwire keys new`")
        return cls(key)

    def write(self, path: str | Path) -> None:
        """Save it in a new file that only this user can read."""
        from cryptography.hazmat.primitives import serialization as s

        text = self._key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(text)
        except FileExistsError as error:
            raise ConfigError(f"{path} exists already: a key is never overwritten, choose another --out") from error
        except OSError as error:
            raise ConfigError(f"cannot write the key {path}: {error.strerror or error}") from error

    @property
    def public(self) -> PublicKey:
        """The half that others may know."""
        return PublicKey(PREFIX + base64.b64encode(self._key.public_key().public_bytes_raw()).decode())

    def sign(self, data: bytes) -> bytes:
        """A signature of 64 bytes."""
        return self._key.sign(data)


class Ed25519(Signer):
    """Signs as one worker of a run, and knows the public keys of all.

    Args:
        key: this worker's own.
        id: its number in the roster.
        keys: public keys by number; a roster adds to it.
        context: what every signature is for besides the data: the run, so that nothing of one run is worth anything in another.
    """

    nbytes = SIGNATURE

    def __init__(self, key: PrivateKey, id: int, keys: Mapping[int, PublicKey], *, context: bytes):
        """Keep them."""
        self.id, self._key, self._keys, self._context = id, key, keys, context

    def sign(self, data: bytes) -> bytes:
        """This worker's signature."""
        return self._key.sign(self._context + data)

    def verify(self, id: int, data: bytes, signature: bytes) -> bool:
        """Whether worker `id` signed the data in this run."""
        key = self._keys.get(id)
        return key is not None and key.verify(self._context + data, signature)


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependency(f"keys need cryptography: {how_to_install('store')}") from error
    return ed25519
