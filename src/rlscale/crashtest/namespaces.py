"""Nodes on one machine: each has its own network, processes, mounts and host name. Linux, root only.

    switch     a network namespace with a bridge
      ├─ node 0    eth0 10.77.0.1 ─ its processes, /dev/shm, /etc/hosts, private folders
      ├─ node 1    eth0 10.77.0.2
      └─ ...

Nothing is visible outside: several networks with the same addresses exist side by side. The kernel removes a namespace
with its last process, and every process here dies with the process that created the network, however that ends.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

SUBNET = "10.77.0"
MAX_NODES = 200
TOOLS = ("ip", "unshare", "nsenter", "setpriv")

# Kills the process as soon as its parent dies; survives the exec of the command after it.
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
# Interfaces of this process; those of a node are others.
_INTERFACES = frozenset({"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"})
_OWN = ("--net", "--uts", "--ipc", "--mount", "--pid")

# The first process of a node: children that lose their parent are its own, and are removed when they end.
_INIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
_SWITCH = "ip link add bridge0 type bridge && ip link set bridge0 up && echo ready && exec sleep infinity"


class NodesError(RuntimeError):
    """A node could not be set up, or Ray did not start on it."""


def reason_unavailable() -> str | None:
    """The reason why this machine cannot have such nodes; None: it can."""
    if sys.platform != "linux":
        return "namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "namespaces with a network need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} must be installed (Debian packages iproute2 and util-linux)"
    tried = subprocess.run(
        ["unshare", *_OWN, "--fork", "ip", "link", "add", "test0", "type", "veth", "peer", "name", "test1"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"the kernel refuses namespaces: {tried.stderr.strip()}"


class Network:
    """A switch and its nodes. All processes of a node end with it, and all nodes with the network.

    Create it in the main thread: the kernel ties processes to the thread that starts them.

    Example:
        with Network() as network:
            node = network.add_node()
            node.run(["ping", "-c1", other.address])
            node.kill()
    """

    def __init__(self) -> None:
        self._switch: subprocess.Popen[str] | None = None
        self._numbers = itertools.count()
        self.nodes: list[Node] = []

    def __enter__(self) -> Self:
        self._switch = _start([*_DIE_WITH_PARENT, "unshare", "--net", "sh", "-c", _SWITCH])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.kill()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()

    def add_node(self, *, private: Sequence[Path] = ()) -> "Node":
        """Starts a node and connects it to the switch.

        Args:
            private: existing folders that are empty on this node and not shared with the others.
        """
        assert self._switch is not None, "the network must be entered"
        number = next(self._numbers)
        assert number < MAX_NODES, "the subnet has no more addresses"
        unshare = ("unshare", *_OWN, "--fork", "--kill-child=KILL", "--mount-proc", "--propagation", "private")
        process = _start([*_DIE_WITH_PARENT, *unshare, sys.executable, "-I", "-S", "-c", _INIT])
        port = SwitchPort(switch=self._switch.pid, name=f"port{number}")
        node = Node(f"node{number}", f"{SUBNET}.{number + 1}", process, port)
        try:
            port.connect(node.pid)
            node.run(["sh", "-c", _setup_script(node, private)], check=True)
        except BaseException:
            node.kill()
            raise
        self.nodes.append(node)
        return node


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchPort:
    """The end of a node's cable at the switch."""

    switch: int  # process id
    name: str

    def connect(self, node: int) -> None:
        """Connects eth0 of the node with this process id."""
        peer = ("peer", "name", self.name, "netns", str(self.switch))
        _call("ip", "link", "add", "eth0", "netns", str(node), "type", "veth", *peer)
        self._set("up", "master", "bridge0")

    def cut(self) -> None:
        self._set("down")

    def _set(self, *state: str) -> None:
        _call("nsenter", "--target", str(self.switch), "--net", "ip", "link", "set", self.name, *state)


class Node:
    """One node of a `Network`."""

    def __init__(self, name: str, address: str, process: "subprocess.Popen[str]", port: SwitchPort) -> None:
        self.name, self.address, self._process, self._port = name, address, process, port
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self.pid = int(children[0])  # of its first process, as this process sees it

    def command(self, command: Sequence[str], *, folder: Path | None = None) -> list[str]:
        """The command line that runs `command` on this node."""
        where = [] if folder is None else [f"--wd={folder}"]
        names = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        enter = ("nsenter", "--target", str(self.pid), *names, *where, "--")
        # The second time for the command itself, a child of nsenter: who kills nsenter means the command.
        return [*_DIE_WITH_PARENT, *enter, *_DIE_WITH_PARENT, *command]

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        check: bool = False,
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a command on this node to its end.

        Raises NodesError with the output of a command that fails, if `check`.
        """
        done = subprocess.run(
            self.command(command), env=_environment(env), text=True, capture_output=True, timeout=timeout_s, check=False
        )
        if check and done.returncode != 0:
            raise NodesError(f"{self.name}: {command} ended with {done.returncode}: {done.stderr}{done.stdout}")
        return done

    def start(
        self,
        command: Sequence[str],
        *,
        output: IO[bytes] | IO[str] | int,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Starts a command on this node, in `folder`; its output and errors go to `output`."""
        command = self.command(command, folder=folder)
        return subprocess.Popen(command, env=_environment(env), stdout=output, stderr=subprocess.STDOUT)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self, *, silently: bool = False) -> None:
        """Kills the first process, and with it all processes of the node; its network disappears.

        Args:
            silently: as if it lost its power: other nodes get no sign that its connections end.
        """
        if self.is_alive:
            if silently:
                self._port.cut()
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait()


def _setup_script(node: Node, private: Sequence[Path]) -> str:
    """Shell script that configures a node from inside.

    The host name resolves to a loopback address, as Debian configures it, and a second network leads nowhere: programs
    that take either for the address of the node fail.
    """
    lines = [
        "set -e",
        f"hostname {node.name}",
        "mount -t tmpfs -o size=2g tmpfs /dev/shm",
        *(f"mount -t tmpfs tmpfs '{folder}'" for folder in private),
        "hosts=/dev/shm/.hosts",
        f"printf '127.0.0.1 localhost\\n127.0.1.1 {node.name}\\n' > $hosts",
        "mount --bind $hosts /etc/hosts",
        "ip link set lo up",
        "ip link add lan0 type veth peer name lan1",
        "ip addr add 192.168.250.1/24 dev lan0",
        "ip link set lan0 up",
        "ip link set lan1 up",
        f"ip addr add {node.address}/24 dev eth0",
        "ip link set eth0 up",
        "ip route add default dev eth0",
    ]
    return "\n".join(lines)


def _start(command: Sequence[str]) -> "subprocess.Popen[str]":
    """Starts a process that prints a line once it is ready."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    began = time.monotonic()
    line = process.stdout.readline().strip()
    if line != "ready":
        process.kill()
        raise NodesError(f"a namespace could not be made within {time.monotonic() - began:.1f} s: {line}")
    return process


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NodesError(f"{' '.join(command)}: {done.stderr.strip()}")


def _environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a command on a node: that of this process, and `given`."""
    inherited = {name: value for name, value in os.environ.items() if name not in _INTERFACES}
    return inherited | dict(given or {})
