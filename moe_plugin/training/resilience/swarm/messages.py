"""Messages between a trainer and its peers: dictionaries of plain values and tensors over TCP.

Tensors of a stage's boundary travel in a wire format of `dispatch.wire`, by default fp8 with a
scale for each 128 numbers (the bound of its error is there). What arrives is read as data alone
(`torch.load(weights_only=True)`): a message can run no code. With a secret both sides of a
connection prove that they know it before the first message; nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import ipaddress
import logging
import os
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_plugin.checkpoint import trust
from moe_plugin.dispatch.wire import FORMATS
from moe_plugin.utils.messages import short

log = logging.getLogger(__name__)

Address = tuple[str, int]
Message = dict[str, Any]
_HEAD = struct.Struct("!4sQ")
_MAGIC = b"moe1"
WIRES = ("none", *FORMATS)
CONNECTIONS = 256  # to one server at a time
PATIENCE_S = 60.0  # for a connection's first header, and without a byte of what has begun
SLOWEST = 1 << 16  # bytes per second of a message that has begun


@dataclass(frozen=True)
class Access:
    """Who may connect, and what is accepted from them.

    Attributes:
        secret: that both sides must know. Optional: anybody may connect by default.
        message_bytes: the largest message.
    """

    secret: str | None = None
    message_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if self.message_bytes < 1 or self.secret == "":
            raise ValueError(f"swarm: message_bytes={self.message_bytes} must be >= 1, and secret "
                             "a text that is not empty; leave secret out, or use a long random one")

    def proof(self, side: bytes, nonces: bytes) -> bytes:
        """What only a side that knows the secret can say of both sides' random numbers."""
        return hmac.digest((self.secret or "").encode(), side + nonces, "sha256")


OPEN = Access()


class _Closed(ConnectionError):
    """The other side has closed the connection between two messages."""


class PeerError(RuntimeError):
    """A peer answered that it failed, with its reason."""


class Connection:
    """One connection.

    Args:
        timeout_s: of a connection, and without a byte in either direction. None: wait for the
            next message without a limit.
        access: the secret, which the other side must know, and the largest message.
        serves: this side was connected to.
    Raises:
        OSError: no connection, or it ended; `TimeoutError` among them.
    """

    def __init__(self, opened: socket.socket, timeout_s: float | None, access: Access = OPEN,
                 serves: bool = False) -> None:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._timeout_s, self._access = opened, timeout_s, access
        self._first = serves  # a stranger could wait without a word
        if access.secret is not None:
            try:
                self._prove(b"server" if serves else b"client")
            except BaseException:
                opened.close()
                raise

    def _prove(self, side: bytes) -> None:
        """Show that this side knows the secret, once the other side has sent a random number."""
        other, mine = b"client" if side == b"server" else b"server", os.urandom(32)
        self._socket.settimeout(PATIENCE_S)
        self._socket.sendall(mine)
        theirs = bytes(self._read(32, PATIENCE_S))
        nonces = mine + theirs if side == b"client" else theirs + mine
        self._socket.sendall(self._access.proof(side, nonces))
        said = bytes(self._read(32, PATIENCE_S))
        if not hmac.compare_digest(said, self._access.proof(other, nonces)):
            raise ConnectionRefusedError("the other side does not know the secret; give both sides "
                                         "the same")

    @classmethod
    def to(cls, address: Address, timeout_s: float, access: Access = OPEN) -> Connection:
        """Connect."""
        return cls(socket.create_connection(tuple(address), timeout_s), timeout_s, access)

    def send(self, message: Message) -> None:
        """Send a message."""
        made = io.BytesIO()
        torch.save(message, made)
        body = made.getbuffer()
        if len(body) > self._access.message_bytes:
            raise ValueError(f"a message of {len(body)} bytes: must have at most "
                             f"{self._access.message_bytes}; give a larger message_bytes on all "
                             "machines")
        self._socket.settimeout(self._timeout_s or PATIENCE_S + len(body) / SLOWEST)
        self._socket.sendall(_HEAD.pack(_MAGIC, len(body)))
        self._socket.sendall(body)

    def receive(self) -> Message:
        """The next message."""
        self._socket.settimeout(PATIENCE_S if self._first else self._timeout_s)
        self._first, start = False, self._socket.recv(1)
        if not start:
            raise _Closed("the other side has closed the connection")
        magic, size = _HEAD.unpack(start + bytes(self._read(_HEAD.size - 1, PATIENCE_S)))
        if magic != _MAGIC:
            raise ConnectionRefusedError(f"{magic!r} does not begin a message of a peer")
        if size > self._access.message_bytes:
            raise ConnectionRefusedError(f"a message of {size} bytes is announced: must be at most "
                                         f"message_bytes={self._access.message_bytes}")
        body = io.BytesIO(self._read(size, PATIENCE_S + size / SLOWEST))
        try:
            return trust.load(body, (), "a message of a peer")
        except Exception as error:  # torch, pickle and zipfile raise many kinds for wrong bytes
            raise ConnectionRefusedError(
                f"a message that cannot be read: {short(error)}") from error

    def _read(self, size: int, within_s: float) -> memoryview:
        made, end, at = memoryview(np.empty(size, np.uint8)), time.monotonic() + within_s, 0
        while at < size:
            self._socket.settimeout(max(1e-3, min(PATIENCE_S, end - time.monotonic())))
            count = self._socket.recv_into(made[at:])
            if not count:
                raise ConnectionError(f"the other side has closed the connection after {at} of "
                                      f"{size} bytes")
            at += count
        return made

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
        self._socket.close()


class Connections:
    """Connections to many addresses, each used by one thread at a time and then by others."""

    def __init__(self, timeout_s: float, access: Access = OPEN) -> None:
        self.timeout_s, self.access = timeout_s, access
        self._idle: dict[Address, list[Connection]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def to(self, address: Address) -> Iterator[Connection]:
        """A connection; one on which something failed is closed: an answer may still come."""
        with self._lock:
            idle = self._idle.get(address, [])
            connection = idle.pop() if idle else None
        connection = connection or Connection.to(address, self.timeout_s, self.access)
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


def ask(address: Address, what: str, timeout_s: float, access: Access = OPEN, /,
        **values: Any) -> Message:
    """One request on a connection of its own; raises what `Connection.ask` raises."""
    connection = Connection.to(address, timeout_s, access)
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
        access: who may connect.
    """

    def __init__(self, host: str, port: int, answer: Callable[[Message], Message | None],
                 access: Access = OPEN) -> None:
        free = threading.Semaphore(CONNECTIONS)
        if access.secret is None and not _is_local(host):
            log.warning("whoever reaches %s can take part in this swarm and change its weights: "
                        "give the trainer and all peers a secret, or use a network that you trust",
                        host)

        class Handler(socketserver.BaseRequestHandler):
            def handle(handler) -> None:  # noqa: N805
                why = f"{CONNECTIONS} others are open"
                if free.acquire(blocking=False):
                    try:
                        why = _serve(handler.request, answer, access)
                    finally:
                        free.release()
                if why:
                    log.warning("connection from %s closed: %s", handler.client_address, why)

        self._server = _TCPServer((host, port), Handler)
        self.address: Address = (host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,),
                                        daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no further connection."""
        self._server.shutdown()
        self._server.server_close()


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _serve(opened: socket.socket, answer: Callable[[Message], Message | None],
           access: Access) -> str:
    """Answer until the other side is gone; why it was not, or empty text."""
    try:
        connection = Connection(opened, None, access, serves=True)
        while True:
            request = connection.receive()
            try:
                found = answer(request)
            except Exception as error:  # the one who asked decides what it means
                found = {"error": f"{type(error).__name__}: {error}"}
            if found is not None:
                connection.send(found)
    except _Closed:  # the other side has no more requests
        return ""
    except OSError as error:
        return short(error)


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
