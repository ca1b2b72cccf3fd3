"""Two hosts that are namespaces of this machine: each has a name, an address, and a link between.

Root on Linux, with `unshare`, `nsenter` and `ip`.  They share the file system, as in a cluster, but
not /etc/hosts: there each one's own name stands for its loopback, as Debian sets it up, so that two
hosts which go by their names never meet.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_APART = ("unshare", "--net", "--uts", "--mount")
_READY_S = 10.0
_LINK = "link0"  # on both sides
_SET_UP = """\
hostname {name} && mount --bind {hosts} /etc/hosts && ip link set lo up && echo ready && \
exec sleep infinity"""


@dataclass(frozen=True)
class Host:
    """One of them: its name, its address, the process that keeps its namespaces."""

    name: str
    ip: str
    pid: int

    def command(self, argv: Sequence[str]) -> list[str]:
        """The same command, on this host."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--", *argv]

    def link(self, state: str) -> None:
        """Takes this host's end of the link "up" or "down"."""
        subprocess.run(self.command(["ip", "link", "set", _LINK, state]), check=True)


def available() -> bool:
    """Whether this machine lets us make namespaces."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    made = ["ip", "link", "add", "name", _LINK, "type", "veth"]
    tried = subprocess.run([*_APART, *made], capture_output=True, check=False)
    return not tried.returncode


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link that is up; they are gone afterwards."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxdp-hosts-")))
        ips = {"node0": "10.77.0.1", "node1": "10.77.0.2"}
        first, second = (_host(stack, folder, name, ips) for name in ips)
        # named by both at once: on this machine itself there may be others of the name
        made = ["ip", "link", "add", "name", _LINK, "netns", str(first.pid), "type", "veth"]
        made += ["peer", "name", _LINK, "netns", str(second.pid)]
        subprocess.run(made, check=True)
        for host in (first, second):
            address = ["ip", "address", "add", f"{host.ip}/24", "dev", _LINK]
            subprocess.run(host.command(address), check=True)
            host.link("up")
        yield first, second


def _host(stack: contextlib.ExitStack, folder: Path, name: str, ips: dict[str, str]) -> Host:
    hosts = folder / name
    others = [f"{ip} {other}\n" for other, ip in ips.items() if other != name]
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{''.join(others)}")
    command = _SET_UP.format(name=name, hosts=hosts)
    keeper = subprocess.Popen(
        [*_APART, "sh", "-c", command],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    stack.callback(keeper.wait, _READY_S)
    stack.callback(keeper.kill)
    assert keeper.stdout is not None
    stack.callback(keeper.stdout.close)
    if keeper.stdout.readline() != "ready\n":
        raise OSError(f"host {name} could not be set up")
    return Host(name, ips[name], keeper.pid)
