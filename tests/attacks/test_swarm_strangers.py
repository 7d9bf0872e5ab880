"""Strangers who connect to a swarm."""

from __future__ import annotations

import io
import logging
import socket
import struct
import threading
import time
import zipfile
from collections.abc import Iterator

import pytest
import torch

from moe_plugin.training.resilience.swarm import Swarm, messages
from moe_plugin.training.resilience.swarm.messages import Access, Connection, MessageServer, ask

WAIT_S = 20.0


@pytest.fixture
def server() -> Iterator[MessageServer]:
    made = MessageServer("127.0.0.1", 0, lambda message: {"got": message["x"]},
                         Access(message_bytes=1 << 16))
    yield made
    made.close()


@pytest.fixture
def guarded() -> Iterator[MessageServer]:
    made = MessageServer("127.0.0.1", 0, lambda message: {"got": message["x"]}, Access("secret"))
    yield made
    made.close()


def closed(stranger: socket.socket) -> bool:
    """Wait until the server has closed a connection."""
    stranger.settimeout(WAIT_S)
    try:
        while stranger.recv(1 << 10):
            pass
    except ConnectionError:
        pass
    return True


def said(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    """Whether one line of the log says why a connection was closed, without a traceback."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        found = [one for one in caplog.records if text in one.getMessage()]
        if found:
            return all(one.levelno == logging.WARNING and not one.exc_info for one in found)
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(("sent", "why"), [
    (struct.pack("!4sQ", b"moe1", 6 << 30), "6442450944 bytes is announced"),
    (struct.pack("!4sQ", b"moe1", 2**64 - 1), "18446744073709551615 bytes is announced"),
    (b"GET / HTTP/1.1\r\n\r\n", "does not begin a message"),
    (struct.pack("!4sQ", b"moe1", 5) + b"12345", "cannot be read"),
    (struct.pack("!4sQ", b"moe1", 0), "cannot be read")])
def test_wrong_messages_end_their_connection(
        server: MessageServer, caplog: pytest.LogCaptureFixture, sent: bytes, why: str) -> None:
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(sent)
        assert closed(stranger) and said(caplog, why)
    assert ask(server.address, "x", WAIT_S, x=3) == {"got": 3}


def test_a_compressed_message_is_not_unpacked(server: MessageServer,
                                              caplog: pytest.LogCaptureFixture) -> None:
    plain, made = io.BytesIO(), io.BytesIO()
    torch.save({"do": "x", "x": torch.zeros(1 << 18)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(
            made, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    body = made.getvalue()
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(struct.pack("!4sQ", b"moe1", len(body)) + body)
        assert closed(stranger) and said(caplog, "compressed or share data")


def test_who_says_nothing_is_not_waited_for(server: MessageServer, caplog: pytest.LogCaptureFixture,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PATIENCE_S", 0.1)
    for sent in (b"", b"mo", struct.pack("!4sQ", b"moe1", 9) + b"1"):
        with socket.create_connection(server.address) as stranger:
            stranger.sendall(sent)
            assert closed(stranger) and said(caplog, "timed out")
        caplog.clear()
    known = Connection.to(server.address, WAIT_S)  # between messages there is no such limit
    assert known.ask("x", x=1) == {"got": 1}
    time.sleep(0.3)
    assert known.ask("x", x=2) == {"got": 2}
    known.close()


def test_too_many_connections_are_refused(caplog: pytest.LogCaptureFixture,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "CONNECTIONS", 4)
    server, before = MessageServer("127.0.0.1", 0, lambda message: {}), threading.active_count()
    strangers = [socket.create_connection(server.address) for _ in range(24)]
    try:
        for one in strangers:
            one.sendall(b"mo")
        assert said(caplog, "4 others are open")
        refused = sum("4 others are open" in record.getMessage() for record in caplog.records)
        end = time.monotonic() + WAIT_S
        while refused < 20 and time.monotonic() < end:
            time.sleep(0.01)
            refused = sum("4 others are open" in r.getMessage() for r in caplog.records)
        assert refused == 20
        while threading.active_count() > before + 4 and time.monotonic() < end:
            time.sleep(0.01)
        assert threading.active_count() <= before + 4
    finally:
        for one in strangers:
            one.close()
        server.close()


def test_a_secret_is_needed_on_both_sides(guarded: MessageServer, server: MessageServer,
                                          caplog: pytest.LogCaptureFixture) -> None:
    assert ask(guarded.address, "x", WAIT_S, Access("secret"), x=1) == {"got": 1}
    for access in (Access("other"), Access()):
        with pytest.raises(OSError):
            ask(guarded.address, "x", WAIT_S, access, x=1)
    assert said(caplog, "does not know the secret")
    with pytest.raises(OSError):  # which would have believed any server
        ask(server.address, "x", WAIT_S, Access("secret"), x=1)


def test_what_one_side_proves_is_not_what_the_other_proves() -> None:
    access = Access("secret")
    assert access.proof(b"server", b"1") != access.proof(b"client", b"1")
    assert access.proof(b"server", b"1") != Access("other").proof(b"server", b"1")


def test_bounds_and_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="message_bytes=0 must be >= 1"):
        Access(message_bytes=0)
    with pytest.raises(ValueError, match="secret must not be empty"):
        Swarm(1, secret="")
    Swarm(1, secret="s", host="0.0.0.0").close()
    assert not caplog.records
    Swarm(1, host="0.0.0.0").close()
    assert said(caplog, "anyone who can reach 0.0.0.0 can join")
    with pytest.raises(ValueError, match="at most 10 are allowed"):
        made = MessageServer("127.0.0.1", 0, lambda message: {})
        try:
            ask(made.address, "x", WAIT_S, Access(message_bytes=10), x=torch.zeros(99))
        finally:
            made.close()
