"""The emulated cluster itself: nodes are apart, links have their rate and delay, nothing is left
behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_plugin.comm import TorchComm
from moe_plugin.planner.forest.network import Network
from scripts.emulate import EmulatedCluster, networks, why_not
from scripts.emulate.namespaces import build_switch

pytestmark = pytest.mark.distributed
Make = Callable[..., EmulatedCluster]


def _where() -> tuple:
    comm = TorchComm()
    total = comm.all_reduce(torch.tensor(float(comm.rank)))
    return socket.gethostname(), os.environ["LOCAL_RANK"], total.item(), comm.prepare().nodes


def test_ranks_are_on_their_nodes(cluster: Make) -> None:
    found = cluster(2, 2).run(_where)
    assert found == [("node0", "0", 6.0, ((0, 1), (2, 3))), ("node0", "1", 6.0, ((0, 1), (2, 3))),
                     ("node1", "0", 6.0, ((0, 1), (2, 3))), ("node1", "1", 6.0, ((0, 1), (2, 3)))]


def _send(size: int, rounds: int = 1) -> float:
    """Seconds in which rank 0 sends to rank 1 and hears back."""
    x, back = torch.zeros(size, dtype=torch.uint8), torch.zeros(1)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        if dist.get_rank() == 0:
            dist.send(x, 1)
            dist.recv(back, 1)
        else:
            dist.recv(x, 0)
            dist.send(back, 0)
    return (time.perf_counter() - start) / rounds


def test_nothing_is_faster_than_the_link(cluster: Make) -> None:
    """A lower bound, so no load of the machine can break it: 1 MB at 40 Mbit/s takes 0.2 s, a round
    trip 20 ms.
    """
    small = cluster(2, 1, rate_bit_s=40e6, delay_s=10e-3)
    assert min(small.run(_send, 1_000_000)) > 1_000_000 * 8 / 40e6
    assert min(small.run(_send, 1, 5)) > 0.02


def _both_ways(size: int) -> float:
    """Seconds in which each of three ranks sends to both others."""
    comm = TorchComm()
    x, others = torch.zeros(size, dtype=torch.uint8), [p for p in range(3) if p != comm.rank]
    comm.barrier()
    begun = time.perf_counter()
    comm.send_receive([(p, x) for p in others], [(p, torch.empty_like(x)) for p in others])
    return time.perf_counter() - begun


def test_a_network_shapes_what_passes_between_two_nodes(cluster: Make) -> None:
    """A lower bound: node 0 receives 0.5 MB from the others over one wire of 10 Mbit/s."""
    made = cluster(3, 1, rate_bit_s=1e9, delay_s=2e-4)
    made.set_network(Network.from_dict({
        "ranks": 3, "switches": 2, "links": [["0", "s0", 0.00125], ["s0", "s1", 1],
                                             ["1", "s1", 1], ["2", "s1", 1]]}))
    assert made.run(_both_ways, 250_000)[0] > 0.4
    with pytest.raises(ValueError, match="has 4 ranks, but the emulated cluster has 3"):
        made.set_network(networks.equal(4, 1e9))


def test_the_switch_counts_what_passes(cluster: Make) -> None:
    made = cluster(2, 1)
    before = made.stats()
    made.run(_send, 300_000)
    sent = [after.bytes_in - old.bytes_in for after, old in zip(made.stats(), before, strict=True)]
    assert 300_000 < sent[0] < 400_000 and sent[1] < 60_000


def _sent_again(groups: int) -> int:
    """TCP segments that this rank's node sent again while connections were opened, one after the
    other, and used once.
    """

    def count() -> int:
        names, values = (line.split()
                         for line in Path("/proc/self/net/snmp").read_text().splitlines()
                         if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    before = count()
    for _ in range(groups):
        dist.barrier(dist.new_group())
    return count() - before


def test_a_frame_with_no_other_behind_it_leaves_in_time(cluster: Make) -> None:
    """Else it lies in the switch until its sender takes it for lost, connection by connection."""
    assert max(cluster(2, 1, rate_bit_s=1e9, delay_s=2e-4).run(_sent_again, 20)) < 10


def _fail_on_one() -> int:
    if dist.get_rank() == 1:
        raise KeyError("no such thing")
    return 7


def test_a_failing_rank_is_reported_with_its_trace(cluster: Make) -> None:
    made = cluster(2, 1)
    ends = made.collect(made.start(_fail_on_one, group_timeout_s=3), 20)
    assert "KeyError: 'no such thing'" in ends[1].error and "_fail_on_one" in ends[1].error
    with pytest.raises(RuntimeError, match="no such thing"):
        made.run(_fail_on_one, group_timeout_s=3, timeout_s=20)


def _wait_for_nobody(here: Path) -> None:
    here.touch()
    time.sleep(60)


def test_a_rank_that_does_not_answer_is_killed_and_tells_where_it_was(cluster: Make,
                                                                      tmp_path: Path) -> None:
    made = cluster(1, 1)
    ranks = made.start(_wait_for_nobody, tmp_path / "here")
    deadline = time.monotonic() + 30
    while not (tmp_path / "here").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    end = made.collect(ranks, 1.0)[0]
    assert "no answer within 1.0 s" in end.error and "_wait_for_nobody" in end.error
    assert not Path(f"/proc/{ranks[0].pid}").exists()


def test_a_program_on_a_node(cluster: Make) -> None:
    made = cluster(2, 1)
    said = made.command(1, ["sh", "-c", "hostname; cat /proc/net/fib_trie"], stdout=subprocess.PIPE,
                        text=True).communicate(timeout=10)[0]
    assert said.startswith("node1\n") and "10.77.0.2" in said


_LONG = """
import time
from scripts.emulate import EmulatedCluster
with EmulatedCluster(2, 1) as cluster:
    cluster.command(0, ["sleep", "97531"])
    ranks = cluster.start(time.sleep, 97531, join=False)
    print(cluster._switch.pid, *[rank.pid for rank in cluster.running], flush=True)
    time.sleep(97531)
"""


def test_nothing_is_left_after_a_kill() -> None:
    if why_not():
        pytest.skip(why_not())
    controller = subprocess.Popen([sys.executable, "-c", _LONG], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in controller.stdout.readline().split()]
    assert len(pids) == 4 and all(_alive(pid) for pid in pids) and _sleeping() == 1
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (any(map(_alive, pids)) or _sleeping()):
        time.sleep(0.05)
    assert not [pid for pid in pids if _alive(pid)] and not _sleeping()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _sleeping() -> int:
    """Programs started on nodes by `_LONG`."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += entry.read_bytes() == b"sleep\x0097531\x00"
        except OSError:
            continue
    return found


_PROBE = """
from scripts.emulate import EmulatedCluster, why_not
import os
print(why_not())
if why_not() is None:
    with EmulatedCluster(2, 1) as cluster:
        print(len(cluster.collect(cluster.start(os.getuid, join=False), 30)))
"""


def test_without_privileges_there_is_a_reason_and_a_way() -> None:
    """Capabilities are dropped for a child; a user namespace gives them back for what it owns."""
    if why_not() or shutil.which("setpriv") is None:
        pytest.skip(why_not() or "setpriv is not installed")
    drop = ["setpriv", "--bounding-set=-sys_admin,-net_admin,-sys_nice", "--inh-caps=-all"]
    told = subprocess.run([*drop, sys.executable, "-c", _PROBE], capture_output=True, text=True,
                          check=True).stdout
    assert "needs CAP_SYS_ADMIN and CAP_NET_ADMIN (Operation not permitted)" in told
    assert "unshare --user --map-root-user --net" in told
    way = [*drop, "unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*way, "true"], check=False, capture_output=True).returncode:
        pytest.skip("user namespaces are switched off here")
    assert subprocess.run([*way, sys.executable, "-c", _PROBE], capture_output=True, text=True,
                          check=True).stdout.split() == ["None", "2"]


@pytest.mark.fast
def test_bad_values_are_refused() -> None:
    for args, links in [((0, 1), {}), ((65, 1), {}), ((2, 0), {}), ((2, 1), {"rate_bit_s": 0}),
                        ((2, 1), {"delay_s": -1})]:
        with pytest.raises(ValueError, match="emulated cluster"):
            EmulatedCluster(*args, **links)


def test_the_switch_is_compiled_once(tmp_path: Path) -> None:
    first = build_switch(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build_switch(tmp_path) == first and first.stat().st_mtime_ns == stamp and [
        p.name for p in tmp_path.iterdir()
    ] == [first.name]


def test_an_unknown_control_message_is_refused(cluster: Make) -> None:
    with pytest.raises(ValueError, match="unknown command or port: rate 5"):
        cluster(2, 1).set_rate(5, 1e6)
