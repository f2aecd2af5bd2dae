"""Real object stores on the loopback, and a wire to them that fails: for tests and storms.

moto's S3 server refuses to overwrite (`If-None-Match: *`); rclone's answers OK and overwrites. Both are in the extra `servers`.
moto looks for the object and writes it in two steps, between which another request may write it too: of 60 keys that four
clients wrote at the moment when a frozen server went on, 4 had two winners. Real stores do both at once, and so does moto
behind a lock.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT = 600.0  # seconds that a server may take to answer for the first time
KEY, SECRET, BUCKET = "AKIATHINWIRETESTS000", "a-secret-of-the-tests-0123456789", "runs"


def missing(*packages: str) -> str:
    """Why a server cannot be started here; empty where it can."""
    names = [name for name in packages if not _there(name)]
    return f"needs {', '.join(names)}: pip install 'thinwire[servers]'" if names else ""


def _there(package: str) -> bool:
    if package == "rclone":
        return _rclone() is not None
    return importlib.util.find_spec(package) is not None


def _rclone() -> str | None:
    beside = Path(sys.executable).with_name("rclone")
    return str(beside) if beside.exists() else shutil.which("rclone")


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def options(port: int) -> dict[str, Any]:
    """What `ObjectStore` needs to reach a server on this port."""
    endpoint = f"http://127.0.0.1:{port}"
    return {"endpoint": endpoint, "access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}


def environment(port: int) -> dict[str, str]:
    """The same for a process, as the tools of the provider have it."""
    names = {"endpoint": "AWS_ENDPOINT", "access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"}
    return {names.get(name, "AWS_REGION"): value for name, value in options(port).items()}


_MOTO = """
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

app, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

def one_put_at_a_time(environ, start_response):
    if environ["REQUEST_METHOD"] != "PUT":
        return app(environ, start_response)
    with lock:
        return list(app(environ, start_response))

run_simple("127.0.0.1", int(sys.argv[1]), one_put_at_a_time, threaded=True)
"""


class Server:
    """A server in a process of its own, which can be frozen, killed and started again on the same port."""

    def __init__(self, command: list[str], port: int):
        """Start it and wait until it answers."""
        self.command, self.port = command, port
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + LIMIT
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.command[0]} does not answer on port {self.port}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/")
            connection.getresponse()
            return True
        return False

    def freeze(self) -> None:
        """It takes requests and answers none."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone at once."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def _signal(self, which: signal.Signals) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self._process.pid, which)


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """An S3 server with a conditional put, in memory, with the bucket `BUCKET`."""
    port = free_port()
    with _served(Server([sys.executable, "-c", _MOTO, str(port)], port)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
        with contextlib.closing(connection):
            connection.request("PUT", f"/{BUCKET}", headers={"Host": "s3.amazonaws.com"})
            assert connection.getresponse().status == 200
        yield server


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    """An S3 server without a conditional put, over a folder; it keeps what it has when it is started again."""
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    port, program = free_port(), _rclone()
    assert program is not None
    keys = ["--auth-key", f"{KEY},{SECRET}"]
    with _served(Server([program, "serve", "s3", "--addr", f"127.0.0.1:{port}", *keys, str(folder)], port)) as server:
        yield server


@contextlib.contextmanager
def _served(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.kill()


class Proxy:
    """A wire to a server on the loopback that can fail: `mode` is what it does to connections from now on.

    "pass" hands everything on. "reset" ends connections at once. "lose" hands requests on, and ends the connection in place of
    the answer. "delay" waits `seconds` before each part of an answer.
    """

    def __init__(self, target: int, *, seconds: float = 0.2):
        """Listen on a free port for the server on port `target`."""
        self.target, self.mode, self.seconds, self.lost = target, "pass", seconds, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections that are open."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target), timeout=LIMIT)
        except OSError:
            client.close()
            return
        with client, server:
            self._open |= {client, server}
            forth = threading.Thread(target=self._hand_on, args=(client, server, False), daemon=True)
            forth.start()
            self._hand_on(server, client, True)
            forth.join(LIMIT)
            self._open -= {client, server}

    def _hand_on(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.mode == "reset" or (answers and self.mode == "lose"):
                    self.lost += 1
                    break
                if answers and self.mode == "delay":
                    time.sleep(self.seconds)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
