"""Linux namespaces without names or files, and the switch that connects them.

A namespace is removed when its last file descriptor is closed and its last process has ended. The
switch is compiled on first use, and the compiled program is stored in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from moe_plugin.utils.machine import call_libc, user_cache

SOURCE = Path(__file__).with_name("switch.c")
COMPILERS = ("cc", "gcc", "clang")
_NEWUTS, _NEWNET = 0x04000000, 0x40000000
_SYSCTL = {
    # an exchange after a pause must not start with a small window or an earlier run's losses
    "/proc/sys/net/ipv4/tcp_slow_start_after_idle": "0",
    "/proc/sys/net/ipv4/tcp_no_metrics_save": "1",
    # the same on every machine, because BBR, the default of some, uses only 80 % of a shared link
    "/proc/sys/net/ipv4/tcp_congestion_control": "reno",
    # frames of up to 46 KB cross the switch as one unit; with pacing they would have two segments
    # and need four times the CPU time
    "/proc/sys/net/ipv4/tcp_min_tso_segs": "32",
}


@dataclass(frozen=True)
class Node:
    """A node of the cluster, which consists of a network namespace and a host name (UTS) namespace.

    Attributes:
        net: file descriptor of the network namespace.
        uts: file descriptor of the host name namespace.
    """

    index: int
    net: int
    uts: int

    @property
    def address(self) -> str:
        """The node's address in the emulated network."""
        return f"10.77.0.{self.index + 1}"

    @property
    def hostname(self) -> str:
        """The node's host name."""
        return f"node{self.index}"

    def enter(self) -> None:
        """Move the calling thread into the namespaces of this node. If a newly forked process calls
        this method, the whole process moves.
        """
        call_libc("setns", self.net, _NEWNET)
        call_libc("setns", self.uts, _NEWUTS)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.net)
        os.close(self.uts)


def make_node(index: int) -> Node:
    """Create a node in a helper thread, so that the calling thread remains in its own namespaces.
    """
    found: list[Node | BaseException] = []

    def work() -> None:
        try:
            call_libc("unshare", _NEWNET | _NEWUTS)
            socket.sethostname(f"node{index}")
            for path, value in _SYSCTL.items():
                Path(path).write_text(value)
            flags = os.O_RDONLY | os.O_CLOEXEC
            found.append(
                Node(index, os.open("/proc/thread-self/ns/net", flags),
                     os.open("/proc/thread-self/ns/uts", flags)))
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread below
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def why_not() -> str | None:
    """Return the reason why this machine cannot run an emulated cluster, or None if it can."""
    if sys.platform != "linux":
        return f"an emulated cluster needs Linux namespaces; this is {sys.platform}"
    if compiler() is None:
        return ("an emulated cluster needs a C compiler for its switch; on Debian or Ubuntu: sudo "
                "apt-get install gcc")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return ("an emulated cluster needs /dev/net/tun; in a container, start it with --device "
                "/dev/net/tun --cap-add NET_ADMIN --cap-add SYS_ADMIN")
    try:
        make_node(0).close()
    except OSError as error:
        return ("an emulated cluster needs CAP_SYS_ADMIN and CAP_NET_ADMIN "
                f"({error.strerror or error}); run as root, or in a user namespace: unshare --user "
                "--map-root-user --net COMMAND")
    return None


# -- the switch


def compiler() -> str | None:
    """Return the path of a C compiler, or None if no compiler is installed."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build_switch(cache: Path | None = None) -> Path:
    """Return the path of the compiled switch. The switch is compiled first if necessary.

    The file name contains a hash of the source code, so that changed source code is compiled again.

    Raises:
        ValueError: If no C compiler is installed, or if the compiler fails. The error message
            contains the compiler's output.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = user_cache("the emulated cluster's switch cannot be compiled there",
                        cache) / f"switch-{digest}"
    if target.exists():
        return target
    cc = compiler()
    if cc is None:
        raise ValueError(
            f"The emulated cluster's switch needs a C compiler ({', '.join(COMPILERS)}), and none "
            "is installed. On Debian or Ubuntu, run sudo apt-get install gcc")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "switch"
        done = subprocess.run([cc, "-O2", "-o", str(made), str(SOURCE)], capture_output=True,
                              text=True, check=False)
        if done.returncode:
            raise ValueError(f"{cc} could not compile {SOURCE}: {done.stderr.strip()}")
        os.replace(made, target)  # atomic, because two processes may compile at the same time
    return target
