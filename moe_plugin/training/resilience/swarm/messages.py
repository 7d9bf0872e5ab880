"""Messages between a trainer and its peers. A message is a dictionary of plain values and tensors,
sent over TCP.

Tensors that are passed from one stage to another are sent in one of the formats of `dispatch.wire`.
The default format is fp8 with one scale per 128 values. For error bounds, see `dispatch.wire`.
Received messages are parsed only as data (`torch.load(weights_only=True)`), so a message cannot
execute code. If a secret is set, both sides of a connection must prove that they know the secret
before they exchange messages. Messages are not encrypted.
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
from dataclasses import dataclass, field
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
@dataclass
class SwarmStep:
    """The result of one training step.

    Attributes:
        losses: loss of each micro-batch, including balance losses.
        norm: L2 norm of all gradients before clipping.
        logged: for each micro-batch, additional values that the loss function returned.
        by: for each micro-batch, the address of the trainer that processed it. For this trainer,
            the address is an empty string.
        resent: number of tasks that were sent more than once.
        redone: number of backward passes that were repeated because a peer failed and its gradients
            were lost.
        gone: addresses of peers that were lost.
        moved: for each peer that was moved, a tuple (address, old stage, new stage).
    """

    losses: list[float] = field(default_factory=list)
    norm: float = 0.0
    logged: list[Message] = field(default_factory=list)
    by: list[str] = field(default_factory=list)
    resent: int = 0
    redone: int = 0
    gone: list[Address] = field(default_factory=list)
    moved: list[tuple[Address, int, int]] = field(default_factory=list)


_HEAD = struct.Struct("!4sQ")
_MAGIC = b"moe1"
WIRES = ("none", *FORMATS)
CONNECTIONS = 256  # simultaneous connections to one server
PATIENCE_S = 60.0  # limit for a connection's first header, and for a pause within a message
SLOWEST = 1 << 16  # bytes per second, the lowest accepted rate within a message


@dataclass(frozen=True)
class Access:
    """Settings that determine which connections and messages are accepted.

    Attributes:
        secret: optional. A secret string that both sides of a connection must know. By default,
            every machine may connect.
        message_bytes: maximum size of a message, in bytes. Larger messages are refused.
    """

    secret: str | None = None
    message_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if self.message_bytes < 1 or self.secret == "":
            raise ValueError(f"swarm: message_bytes={self.message_bytes} must be >= 1, and secret "
                             "must not be empty; leave secret out, or use a long random string")

    def proof(self, side: bytes, nonces: bytes) -> bytes:
        """Compute a proof from the random numbers of both sides. Only a side that knows the secret
        can compute this proof.
        """
        return hmac.digest((self.secret or "").encode(), side + nonces, "sha256")


OPEN = Access()


class _Closed(ConnectionError):
    """Raised if the other side closed the connection between two messages."""


class PeerError(RuntimeError):
    """Raised if a peer reports a failure. The error message states the reason."""


class Connection:
    """A connection between a trainer and a peer.

    Args:
        opened: socket of this connection, which must already be connected.
        timeout_s: maximum time to wait for a connection and for data in either direction, in
            seconds. If `timeout_s` is None, the wait for the next message is not limited.
        access: secret that the other side must know, and maximum size of a message.
        serves: whether this side has accepted the connection.
    Raises:
        OSError: If the connection fails or is closed. This includes `TimeoutError`.
    """

    def __init__(self, opened: socket.socket, timeout_s: float | None, access: Access = OPEN,
                 serves: bool = False) -> None:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._timeout_s, self._access = opened, timeout_s, access
        self._first = serves  # limits how long an unknown client can stay silent
        if access.secret is not None:
            try:
                self._prove(b"server" if serves else b"client")
            except BaseException:
                opened.close()
                raise

    def _prove(self, side: bytes) -> None:
        """Exchange random numbers with the other side, and then prove to each other that both sides
        know the secret.
        """
        other, nonce = b"client" if side == b"server" else b"server", os.urandom(32)
        self._socket.settimeout(PATIENCE_S)
        self._socket.sendall(nonce)
        their_nonce = bytes(self._read(32, PATIENCE_S))
        nonces = nonce + their_nonce if side == b"client" else their_nonce + nonce
        self._socket.sendall(self._access.proof(side, nonces))
        proof = bytes(self._read(32, PATIENCE_S))
        if not hmac.compare_digest(proof, self._access.proof(other, nonces)):
            raise ConnectionRefusedError("the other side does not know the secret; use the same "
                                         "secret on both sides")

    @classmethod
    def to(cls, address: Address, timeout_s: float, access: Access = OPEN) -> Connection:
        """Connect to an address."""
        return cls(socket.create_connection((address[0], address[1]), timeout_s), timeout_s, access)

    def send(self, message: Message) -> None:
        """Send a message."""
        made = io.BytesIO()
        torch.save(message, made)
        body = made.getbuffer()
        if len(body) > self._access.message_bytes:
            raise ValueError(f"a message has {len(body)} bytes, but at most "
                             f"{self._access.message_bytes} are allowed; use a larger "
                             "message_bytes on all machines")
        self._socket.settimeout(self._timeout_s or PATIENCE_S + len(body) / SLOWEST)
        self._socket.sendall(_HEAD.pack(_MAGIC, len(body)))
        self._socket.sendall(body)

    def receive(self) -> Message:
        """Wait for the next message and return it."""
        self._socket.settimeout(PATIENCE_S if self._first else self._timeout_s)
        self._first, start = False, self._socket.recv(1)
        if not start:
            raise _Closed("the other side has closed the connection")
        magic, size = _HEAD.unpack(start + bytes(self._read(_HEAD.size - 1, PATIENCE_S)))
        if magic != _MAGIC:
            raise ConnectionRefusedError(f"{magic!r} does not begin a message of a peer")
        if size > self._access.message_bytes:
            raise ConnectionRefusedError(f"a message of {size} bytes is announced, but at most "
                                         f"message_bytes={self._access.message_bytes} are allowed")
        body = io.BytesIO(self._read(size, PATIENCE_S + size / SLOWEST))
        try:
            return trust.load(body, (), "a message of a peer")
        except Exception as error:  # torch, pickle and zipfile raise many error types
            raise ConnectionRefusedError(
                f"a message cannot be read: {short(error)}") from error

    def _read(self, size: int, within_s: float) -> memoryview:
        made, end, at = np.empty(size, np.uint8).data, time.monotonic() + within_s, 0
        while at < size:
            self._socket.settimeout(max(1e-3, min(PATIENCE_S, end - time.monotonic())))
            count = self._socket.recv_into(made[at:])
            if not count:
                raise ConnectionError(f"the other side has closed the connection after {at} of "
                                      f"{size} bytes")
            at += count
        return made

    def ask(self, what: str, /, **values: Any) -> Message:
        """Send a request, and return the answer.

        Raises:
            PeerError: If the other side reported a failure.
        """
        self.send({"do": what, **values})
        answer = self.receive()
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Connections:
    """A pool of connections to many addresses.

    Each connection is used by one thread at a time, and is reused afterwards.
    """

    def __init__(self, timeout_s: float, access: Access = OPEN) -> None:
        self.timeout_s, self.access = timeout_s, access
        self._idle: dict[Address, list[Connection]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def to(self, address: Address) -> Iterator[Connection]:
        """Return a context manager that provides a connection to an address. After an error, the
        connection is closed, because a late answer could still arrive on it.
        """
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
        """Close the unused connections to an address."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for connection in idle:
            connection.close()


def ask(address: Address, what: str, timeout_s: float, access: Access = OPEN, /,
        **values: Any) -> Message:
    """Send one request on a new connection, and return the answer; see `Connection.ask`."""
    connection = Connection.to(address, timeout_s, access)
    try:
        return connection.ask(what, **values)
    finally:
        connection.close()


class _TCPServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # a restarted trainer can use its previous port
    # Many peers connect at the same time. Linux drops a connection if the queue is full, and the
    # peer retries only after 1, 3 and 7 seconds.
    request_queue_size = 1024
    daemon_threads, block_on_close = True, False


class MessageServer:
    """A server that answers requests. Each connection is handled by a separate thread.

    Args:
        host: address on which the server listens.
        port: port on which the server listens. If `port` is 0, an arbitrary free port is used.
        answer: function that returns the answer to a request, or None if the request needs no
            answer. If the function raises an exception, an error is sent to the other side.
        access: settings that determine which connections and messages are accepted.
    """

    def __init__(self, host: str, port: int, answer: Callable[[Message], Message | None],
                 access: Access = OPEN) -> None:
        free = threading.Semaphore(CONNECTIONS)
        if access.secret is None and not _is_local(host):
            log.warning("anyone who can reach %s can join this swarm and change its weights; "
                        "set a secret for the trainer and all peers, or use a trusted network",
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
        """Stop accepting connections."""
        self._server.shutdown()
        self._server.server_close()


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


def _serve(opened: socket.socket, answer: Callable[[Message], Message | None],
           access: Access) -> str:
    """Answer requests until the connection is closed. Return the reason why the connection was
    closed, or an empty string.
    """
    try:
        connection = Connection(opened, None, access, serves=True)
        while True:
            request = connection.receive()
            try:
                reply = answer(request)
            except Exception as error:  # the client decides how to handle the error
                reply = {"error": f"{type(error).__name__}: {error}"}
            if reply is not None:
                connection.send(reply)
    except _Closed:  # the client has no more requests
        return ""
    except OSError as error:
        return short(error)


def packed(x: Tensor, name: str) -> list[Tensor]:
    """Encode a tensor [B, ...] that is sent between stages, in one of the formats of `WIRES`.

    Integer tensors and tensors without rows are not changed.
    """
    x = x.detach().cpu()
    if name == "none" or not x.is_floating_point() or x.dim() < 2 or not x.numel():
        return [x.contiguous()]
    return [part.contiguous() for part in FORMATS[name].encode(x)]


def unpacked(parts: list[Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """Decode the output of `packed` to floating-point tensors of dtype `dtype`."""
    if len(parts) == 1:
        return parts[0].to(dtype) if parts[0].is_floating_point() else parts[0]
    return FORMATS[name].decode(*parts, dtype=dtype)
