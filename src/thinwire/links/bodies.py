"""Bodies: objects that workers of a cluster hold in memory, and give to each other over TCP connections of their own.

A request is the length of a key (two bytes) and the key; the answer is a length (eight bytes) and as many bytes, or `_NONE`.
There is no group that all workers are in: a connection to a worker that dies ends by itself, and no other worker's does.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable

from thinwire.links.manifest import check_size

_KEY, _LENGTH = struct.Struct("<H"), struct.Struct("<Q")
_MOST_KEY = 256
_NONE = 2**64 - 1
_PIECE = 1 << 20  # bytes that are sent or received in one call, each of which has a time limit
_IDLE = 300.0  # seconds after which a connection that nobody uses is closed; whoever asks opens another
_MOST_CONNECTIONS = 1024
_NEWEST = 64  # objects that are never dropped for want of room


class Bodies:
    """What this worker holds, served at one address of this machine.

    Args:
        host: the address; any free port of it.
        room: bytes after which the oldest are dropped.
        silence: seconds without a byte after which another worker is taken not to answer.
    """

    def __init__(self, host: str, *, room: int = 1 << 30, silence: float = 2.0):
        """Listen."""
        self._objects: OrderedDict[str, bytes] = OrderedDict()
        self._room, self._silence, self._total = room, silence, 0
        self._lock = threading.Lock()
        self._asked: dict[str, socket.socket] = {}  # connections to others, by their address
        self._serving: set[socket.socket] = set()
        self._listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        at = self._listening.getsockname()
        self.address = f"{at[0]}|{at[1]}"
        threading.Thread(target=self._accept, name="thinwire bodies", daemon=True).start()

    # --- What is held -----------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        """Hold an object; the oldest go where there is no room."""
        with self._lock:
            self._forget(key)
            self._objects[key] = data
            self._total += len(data)
            while self._total > self._room and len(self._objects) > _NEWEST:
                self._forget(next(iter(self._objects)))

    def get(self, key: str) -> bytes | None:
        """An object that this worker holds."""
        with self._lock:
            return self._objects.get(key)

    def drop(self, keys: Iterable[str]) -> None:
        """Hold some objects no longer."""
        with self._lock:
            for key in keys:
                self._forget(key)

    def _forget(self, key: str) -> None:
        self._total -= len(self._objects.pop(key, b""))

    def close(self) -> None:
        """End all connections."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # else the thread that accepts would wait on
        with self._lock:
            open_ = [self._listening, *self._serving, *self._asked.values()]
            self._asked.clear()
        for connection in open_:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    # --- For others -------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with self._lock:
                full = len(self._serving) >= _MOST_CONNECTIONS
                self._serving |= set() if full else {connection}
            if full:
                connection.close()
            else:
                threading.Thread(target=self._serve, args=(connection,), name="thinwire body", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                connection.settimeout(_IDLE)
                (length,) = _KEY.unpack(_receive(connection, _KEY.size))
                if length > _MOST_KEY:
                    return
                data = self.get(_receive(connection, length).decode("ascii", "replace"))
                connection.settimeout(self._silence * 4)
                connection.sendall(_LENGTH.pack(_NONE if data is None else len(data)))
                for start in range(0, len(data or b""), _PIECE):
                    connection.sendall(memoryview(data or b"")[start : start + _PIECE])
        except OSError:
            return
        finally:
            with self._lock:
                self._serving.discard(connection)
            connection.close()

    # --- Of others --------------------------------------------------------------------------------------------------------

    def ask(self, address: str, key: str, *, most: int) -> bytes | None:
        """An object that another worker holds; None where it does not, or does not answer.

        Raises:
            WireError: it has more than `most` bytes.
        """
        for _ in range(2):  # a connection that was open may have been closed since
            known = address in self._asked
            try:
                return self._ask(address, key, most)
            except OSError:
                self._hang_up(address)
                if not known:
                    return None
            except BaseException:
                self._hang_up(address)  # what was not read would be taken for the next answer
                raise
        return None

    def _ask(self, address: str, key: str, most: int) -> bytes | None:
        if address not in self._asked:
            host, _, port = address.rpartition("|")
            connection = socket.create_connection((host, int(port)), timeout=self._silence)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._asked[address] = connection
        connection, name = self._asked[address], key.encode("ascii")
        connection.sendall(_KEY.pack(len(name)) + name)
        (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
        if length == _NONE:
            return None
        check_size(key, length, most)
        return bytes(_receive(connection, length))

    def _hang_up(self, address: str) -> None:
        with self._lock:
            connection = self._asked.pop(address, None)
        if connection is not None:
            connection.close()


def _receive(connection: socket.socket, nbytes: int) -> bytearray:
    """So many bytes, which the caller has limited; a `ConnectionError` where the other end closed before."""
    data = bytearray(nbytes)
    view, at = memoryview(data), 0
    while at < nbytes:
        count = connection.recv_into(view[at : at + _PIECE])
        if not count:
            raise ConnectionError("the connection was closed")
        at += count
    return data
