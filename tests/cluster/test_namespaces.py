"""Nodes in namespaces: separate networks, processes and memory; nothing remains of them."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlscale.crashtest.namespaces import Network, Node
from rlscale.crashtest.ray_nodes import RayNodes
from tests.cluster.conftest import NEEDS_NAMESPACES

pytestmark = NEEDS_NAMESPACES

SERVE = "import http.server as s; print('up', flush=True); s.test(s.SimpleHTTPRequestHandler, port=8000)"
GET = "import urllib.request as r; print(r.urlopen('http://{}:8000', timeout={}).status)"
GONE_TIMEOUT_S = 10.0

LEAVE = """
import signal, sys
from rlscale.crashtest.namespaces import Network
with Network() as network:
    node = network.add_node()
    node.start(["sleep", "1000"], output=sys.stderr)
    print(node.pid, flush=True)
    signal.pause()
"""

RANKS = """
import ray, torch, torch.distributed as dist
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as At
from rlscale.cluster.node_network import node_address, use_node_interface
from rlscale.training.distributed import join_world
from rlscale.training.listener import listen

class Rank:
    def listen(self):
        self.socket = listen(node_address())
        return node_address(), self.socket.getsockname()[1]
    def add(self, rank, address, port):
        use_node_interface()
        join_world(rank, 2, address, self.socket if rank == 0 else port, "gloo", 30.0)
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        return node_address(), tensor.item()

ray.init(address="{address}", log_to_driver=False)
group = placement_group([{{"rlscale_slot": 1}}] * 2, strategy="STRICT_SPREAD")
assert group.wait(30)
actors = [ray.remote(num_cpus=0, resources={{"rlscale_slot": 1}})(Rank).options(
    scheduling_strategy=At(group, placement_group_bundle_index=i)).remote() for i in range(2)]
place = ray.get(actors[0].listen.remote())
print(sorted(ray.get([actor.add.remote(i, *place) for i, actor in enumerate(actors)])))
"""

PROBE = """
import ray
from pathlib import Path
from rlscale.cluster.node_probe import ProbeRequest, probe_nodes
from rlscale.cluster.ray_session import driver_node, living_nodes
from rlscale.plan.node_comparison import find_problems
from rlscale.plan.node_facts import PRESENT, CheckedFolder, FixedPort, FolderUse, node_table

ray.init(address="{address}", log_to_driver=False)
nodes = sorted(living_nodes(), key=lambda node: node != driver_node())
file = CheckedFolder(key="sglang.python", path=Path("{file}"), use=FolderUse.present, expected=PRESENT)
request = ProbeRequest(folders=(file,), run_folder=Path("/tmp"), env_vars={{}})
ports = dict.fromkeys(nodes, (FixedPort(key="sglang.grpc_port", port=8000),))
facts = probe_nodes(nodes, request, ports)
print("\\n".join([*node_table(facts, [file]), *map(str, find_problems(facts, [file]))]))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


def serve(node: Node) -> "subprocess.Popen[bytes]":
    process = node.start([sys.executable, "-c", SERVE], output=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def get(node: Node, other: Node, *, timeout_s: float = 10.0) -> str:
    return node.run([sys.executable, "-c", GET.format(other.address, timeout_s)]).stdout.strip()


def test_nodes_reach_each_other_and_hide_their_processes(network: Network) -> None:
    first, second = network.add_node(), network.add_node()
    serve(second)
    assert get(first, second) == "200"
    assert "http.server" not in first.run(["ps", "ax"]).stdout
    assert first.run(["hostname"]).stdout.strip() == first.name
    # As on Debian: a program that takes the address of the host name gets one that no other node reaches.
    assert first.run(["getent", "hosts", first.name]).stdout.split()[0] == "127.0.1.1"


def test_memory_and_private_folders_are_not_shared(network: Network, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "private").mkdir()
    first, second = network.add_node(), network.add_node(private=[tmp_path / "private"])
    for folder in ("/dev/shm", tmp_path / "shared", tmp_path / "private"):
        first.run(["touch", f"{folder}/file"], check=True)
    assert second.run(["ls", "/dev/shm"]).stdout == ""
    assert second.run(["ls", str(tmp_path / "shared")]).stdout == "file\n"
    assert second.run(["ls", str(tmp_path / "private")]).stdout == ""


def test_interfaces_of_this_process_are_not_those_of_a_node(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    node = network.add_node()
    assert node.run(["printenv", "GLOO_SOCKET_IFNAME"]).stdout == ""
    assert node.run(["printenv", "GLOO_SOCKET_IFNAME"], env={"GLOO_SOCKET_IFNAME": "eth0"}).stdout == "eth0\n"


def test_a_killed_node_ends_with_its_processes_and_its_network(network: Network) -> None:
    first, second = network.add_node(), network.add_node()
    server = serve(second)
    second.kill()
    assert not second.is_alive
    assert server.wait(GONE_TIMEOUT_S) != 0
    assert get(first, second, timeout_s=1.0) == ""


def test_two_networks_with_the_same_addresses_are_separate(network: Network) -> None:
    first = network.add_node()
    with Network() as other:
        namesake = [other.add_node() for _ in range(int(first.address.rpartition(".")[2]))][-1]
        assert namesake.address == first.address
        serve(namesake)
        neighbour = other.nodes[0]
        assert get(neighbour, namesake) == "200"
        assert get(network.nodes[0], namesake, timeout_s=1.0) == ""


def test_nothing_outlives_a_creator_that_is_killed() -> None:
    creator = subprocess.Popen([sys.executable, "-c", LEAVE], stdout=subprocess.PIPE, text=True)
    assert creator.stdout is not None
    init = Path("/proc", creator.stdout.readline().strip())
    assert init.exists()
    creator.send_signal(signal.SIGKILL)
    creator.wait()
    deadline_s = time.monotonic() + GONE_TIMEOUT_S
    while init.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not init.exists()


def test_ray_spreads_actors_and_gloo_connects_them(two_nodes: RayNodes) -> None:
    script = RANKS.format(address=two_nodes.address)
    done = two_nodes.head.run([sys.executable, "-c", script], env=two_nodes.env, timeout_s=120)
    assert done.stdout.strip() == "[('10.77.0.1', 3.0), ('10.77.0.2', 3.0)]", done.stderr


def test_the_table_of_nodes_names_a_file_and_a_port_that_one_of_them_lacks(two_nodes: RayNodes, private: Path) -> None:
    file = private / "python"
    file.touch()
    serve(two_nodes.nodes[1])
    script = PROBE.format(address=two_nodes.address, file=file)
    done = two_nodes.head.run([sys.executable, "-c", script], env=two_nodes.env, timeout_s=120)
    header, head, other, *problems = done.stdout.splitlines()
    start, end = header.index("paths"), header.index("clock")
    assert head[start:end].split() == ["same", "free"], done.stderr
    assert other[start:end].split("  ")[0] == "sglang.python" and "sglang.grpc_port in use" in other[start:end]
    assert problems == [
        f"sglang.python must exist on every node, got {file}, which node1 (10.77.0.2) does not have; copy it to this "
        "node, or use a folder of a shared file system",
        "sglang.grpc_port must be free on the nodes that use it, got 8000, which is in use on node1 (10.77.0.2); "
        "choose another port, or end the program that listens there",
    ]
