"""Messages between a trainer and its peers: dictionaries of plain values and tensors over TCP.

Tensors of a stage's boundary travel in a wire format of `dispatch.wire`, by default fp8 with a
scale for each 128 numbers (the bound of its error is there). What arrives is read as data alone
(`torch.load(weights_only=True)`): a message can run no code. Nothing is encrypted or signed.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_plugin.checkpoint import trust
from moe_plugin.dispatch.wire import FORMATS

Address = tuple[str, int]
Message = dict[str, Any]
_HEAD = struct.Struct("!4sQ")
_MAGIC = b"moe1"
WIRES = ("none", *FORMATS)


class PeerError(RuntimeError):
    """A peer answered that it failed, with its reason."""


class Connection:
    """One connection.

    Args:
        timeout_s: of a connection, and without a byte in either direction.
    Raises:
        OSError: no connection, or it ended; `TimeoutError` among them.
    """

    def __init__(self, opened: socket.socket, timeout_s: float | None) -> None:
        opened.settimeout(timeout_s)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = opened
        self._file = opened.makefile("rb")

    @classmethod
    def to(cls, address: Address, timeout_s: float) -> Connection:
        """Connect."""
        return cls(socket.create_connection(tuple(address), timeout_s), timeout_s)

    def send(self, message: Message) -> None:
        """Send a message."""
        made = io.BytesIO()
        torch.save(message, made)
        body = made.getbuffer()
        self._socket.sendall(_HEAD.pack(_MAGIC, len(body)))
        self._socket.sendall(body)

    def receive(self) -> Message:
        """The next message."""
        magic, size = _HEAD.unpack(self._read(_HEAD.size))
        if magic != _MAGIC:
            raise ConnectionError(f"{magic!r} does not begin a message of a peer")
        try:
            return trust.load(io.BytesIO(self._read(size)), (), "a message of a peer")
        except (pickle.UnpicklingError, RuntimeError, ValueError) as error:
            raise ConnectionError(f"a message that cannot be read: {error}") from error

    def _read(self, size: int) -> bytes:
        found = self._file.read(size)
        if len(found) < size:
            raise ConnectionError("the other side has closed the connection")
        return found

    def ask(self, what: str, /, **values: Any) -> Message:
        """Send a request and wait for its answer.

        Raises: PeerError: the other side could not do it.
        """
        self.send({"do": what, **values})
        answer = self.receive()
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        self._socket.close()


class Connections:
    """Connections to many addresses, each used by one thread at a time and then by others."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._idle: dict[Address, list[Connection]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def to(self, address: Address) -> Iterator[Connection]:
        """A connection; one on which something failed is closed: an answer may still come."""
        with self._lock:
            idle = self._idle.get(address, [])
            connection = idle.pop() if idle else None
        connection = connection or Connection.to(address, self.timeout_s)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault(address, []).append(connection)

    def close(self, address: Address) -> None:
        """Close those that are not in use."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for connection in idle:
            connection.close()


def ask(address: Address, what: str, timeout_s: float, /, **values: Any) -> Message:
    """One request on a connection of its own; raises what `Connection.ask` raises."""
    connection = Connection.to(address, timeout_s)
    try:
        return connection.ask(what, **values)
    finally:
        connection.close()


class _TCPServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # a trainer that begins again has the port of the one before
    # Peers come together. Linux drops a connection that finds the queue full, and the peer tries
    # again only after 1, 3 and 7 seconds.
    request_queue_size = 1024
    daemon_threads, block_on_close = True, False


class MessageServer:
    """Answers requests, each connection in a thread of its own.

    Args:
        answer: a request's answer; None: the request has none. What it raises is sent as an error.
    """

    def __init__(self, host: str, port: int, answer: Callable[[Message], Message | None]) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(handler) -> None:  # noqa: N805
                _serve(handler.request, answer)

        self._server = _TCPServer((host, port), Handler)
        self.address: Address = (host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,),
                                        daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no further connection."""
        self._server.shutdown()
        self._server.server_close()


def _serve(opened: socket.socket, answer: Callable[[Message], Message | None]) -> None:
    connection = Connection(opened, None)
    try:
        while True:
            request = connection.receive()
            try:
                found = answer(request)
            except Exception as error:  # the one who asked decides what it means
                found = {"error": f"{type(error).__name__}: {error}"}
            if found is not None:
                connection.send(found)
    except OSError:  # the other side is gone
        connection.close()


def packed(x: Tensor, name: str) -> list[Tensor]:
    """A boundary's tensor [B, ...] as it travels: in a format of `WIRES`; integers, and what has no
    row, as they are.
    """
    x = x.detach().cpu()
    if name == "none" or not x.is_floating_point() or x.dim() < 2 or not x.numel():
        return [x.contiguous()]
    return [part.contiguous() for part in FORMATS[name].encode(x)]


def unpacked(parts: list[Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """The inverse of `packed`. dtype: of floating-point numbers."""
    if len(parts) == 1:
        return parts[0].to(dtype) if parts[0].is_floating_point() else parts[0]
    return FORMATS[name].decode(*parts, dtype=dtype)
