"""What can be known to fail before the processes of a job look for each other.

Without this, JAX waits five minutes for an address that cannot be, and is then aborted.
"""

import contextlib
import errno
import hashlib
import ipaddress
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jaxdp
from jaxdp.errors import UserError
from jaxdp.runtime.place import ADDRESS, BIND, COUNT, ID, Place

MOST_PROCESSES = 1 << 16
RESOLVE_S = 5.0
_NAME_RETRY_S = 3.0
_RELEASE_S = 1.0  # for the process that held the port before to go


class Endpoint(NamedTuple):
    """Where rank 0 listens.

    Attributes:
      host: as it was given, without brackets.
      port: 1 to 65535.
      ip: the address that the name stands for on this host.
    """

    host: str
    port: int
    ip: str

    def __str__(self) -> str:
        return join_address(self.host, self.port)


def join_address(host: str, port: int) -> str:
    """`host:port`, or `[host]:port` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_place(place: Place, tell: Callable[[str], None]) -> Endpoint:
    """Looks at the rank, the count and the address; opens nothing.

    Args:
      place: of this process.
      tell: is given warnings.

    Raises:
      UserError: the processes cannot find each other like this.
    """
    if not 1 <= place.size <= MOST_PROCESSES:
        raise UserError(f"{COUNT}={place.size}: expected 1 to {MOST_PROCESSES} processes")
    if not 0 <= place.rank < place.size:
        raise UserError(
            f"{ID}={place.rank} of {COUNT}={place.size}: ranks are counted from 0, so the last is "
            f"{place.size - 1}"
        )
    host, port = split_address(place.address)
    endpoint = Endpoint(host, port, _address_of(place, host, port, tell))
    if is_loopback(endpoint.ip):
        _refuse_loopback(place, endpoint, tell)
    return endpoint


def split_address(address: str, name: str = ADDRESS) -> tuple[str, int]:
    """Host and port of `host:port` or `[IPv6]:port`, given by the variable `name`.

    Raises:
      UserError: it has another form.
    """
    form = f"{name}={address}: expected HOST:PORT, as in node1:29500 or [fd00::1]:29500"
    host, colon, port = address.strip().rpartition(":")
    if not colon:
        raise UserError(f"{form}; the port is missing")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not host or (":" in host) != bracketed or any(c in host for c in "/@[] "):
        raise UserError(form)
    if not (port.isascii() and port.isdigit()):
        raise UserError(f"{form}; the port is not a number")
    if not 1 <= int(port) <= 65535:
        raise UserError(f"{name}={address}: port {port}; expected 1 to 65535")
    if name == ADDRESS and host in ("0.0.0.0", "::"):
        raise UserError(
            f"{ADDRESS}={address}: stands for all addresses of a host; expected the one at which "
            f"the others reach rank 0 (what it listens on is set with {BIND})"
        )
    return host, int(port)


def _address_of(place: Place, host: str, port: int, tell: Callable[[str], None]) -> str:
    """As `resolve`, again and again where the name is made while its host starts."""
    deadline = time.monotonic() + (place.timeout_s if place.names_come_late else 0)
    while True:
        try:
            return resolve(host, port)
        except UserError as error:
            if time.monotonic() >= deadline:
                raise
            tell(f"rank {place.rank}: waiting for the name of rank 0: {error}")
            time.sleep(_NAME_RETRY_S)


def resolve(host: str, port: int, within_s: float = RESOLVE_S, name: str = ADDRESS) -> str:
    """The address that a host stands for, an IPv4 one if there is one; the variable `name` gave it.

    Raises:
      UserError: there is none, or nobody answered in time.
    """
    found: list[str] = []
    failed: list[str] = []

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            ordered = sorted(infos, key=lambda info: info[0] != socket.AF_INET)
            found.extend(str(info[4][0]) for info in ordered)
        except (OSError, UnicodeError) as error:
            failed.append(getattr(error, "strerror", None) or str(error))

    # a name server that does not answer holds getaddrinfo for as long as it likes
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(within_s)
    if found:
        return found[0]
    why = failed[0] if failed else f"no answer within {within_s:g} s"
    raise UserError(
        f"{name}: host {host!r} cannot be resolved: {why}; expected the name or address of the "
        "host of rank 0"
    )


def is_loopback(ip: str) -> bool:
    """Whether an address can be reached from its own host only."""
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def _refuse_loopback(place: Place, endpoint: Endpoint, tell: Callable[[str], None]) -> None:
    """On several hosts each would look for rank 0 on itself."""
    named = endpoint.host == "localhost" or endpoint.host == endpoint.ip
    line = f"{ADDRESS}={place.address}: {endpoint.host} is {endpoint.ip} on this host"
    if named:
        line = f"{ADDRESS}={place.address}: reaches the processes of one host only"
    if place.one_host is False and (named or place.rank == 0):
        raise UserError(
            f"{line}, and the job has several; expected an address that all of them reach (is the "
            "host's own name in its /etc/hosts?)"
        )
    if place.one_host is None and not named:
        tell(f"warning: {line}, which other hosts cannot reach")


def listen(place: Place, endpoint: Endpoint) -> socket.socket:
    """Rank 0's socket, bound to one address: JAX's default is all of them, for anybody.

    Raises:
      UserError: the port is taken, or the address is not this host's.
    """
    ip = endpoint.ip if place.bind is None else _bind_host(place.bind)
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    deadline = time.monotonic() + _RELEASE_S
    while True:
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((ip, endpoint.port))
            server.listen(min(place.size + 16, 4096))
            return server
        except OSError as error:
            server.close()
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise _cannot_listen(place, ip, endpoint.port, error) from error


def _bind_host(text: str) -> str:
    """The host of JAXDP_COORDINATOR_BIND, with or without a port."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text.strip("[]")))
    host = split_address(text, BIND)[0] if ":" in text else text
    return resolve(host, 0, name=BIND)


def _cannot_listen(place: Place, ip: str, port: int, error: OSError) -> UserError:
    where = join_address(ip, port)
    if error.errno == errno.EADDRINUSE:
        holder = f" by {name}" if (name := holder_of(port)) else ""
        return UserError(
            f"{ADDRESS}: port {port} on {ip} is in use{holder}; end that process, or give all "
            "ranks another port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        if place.bind is not None:
            return UserError(
                f"{BIND}={place.bind}: rank 0 cannot listen on {where}: expected an address of "
                f"this host ({socket.gethostname()})"
            )
        return UserError(
            f"{ADDRESS}: rank 0 cannot listen on {where}, which is no address of this host "
            f"({socket.gethostname()}); start rank 0 there, or set {BIND} to an address of this one"
        )
    return UserError(f"{ADDRESS}: rank 0 cannot listen on {where}: {error.strerror}")


def holder_of(port: int) -> str | None:
    """The process that listens on a port, where Linux lets us see it: `process 42 (redis)`."""
    inodes = {f"socket:[{inode}]" for inode in _listening(port)}
    if not inodes:
        return None
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(fd) in inodes for fd in (folder / "fd").iterdir()):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")[:60]
                return f"process {folder.name} ({command.decode(errors='replace').strip()})"
    return None


def _listening(port: int) -> list[str]:
    """The inodes of sockets that listen on a port, in any family."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = (line.split() for line in Path(table).read_text().splitlines()[1:])
            for row in rows:
                if int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A":  # LISTEN
                    found.append(row[9])
    return found


def versions() -> dict[str, str]:
    """What must be the same for all processes to compile the same program; imports nothing."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("jax", "jaxlib"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {"jaxdp": f"{jaxdp.__version__}, source {_source_digest()}"}


def _source_digest() -> str:
    """Of our modules: a host that was not updated has the same version number."""
    sha = hashlib.sha256()
    root = Path(jaxdp.__file__).parent
    for path in sorted(root.rglob("*.py")):
        sha.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()[:12]
