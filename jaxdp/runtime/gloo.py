"""Which address the processes' CPU collectives listen on."""

import inspect
import socket
from collections.abc import Callable
from typing import Any

from jaxdp.errors import UserError
from jaxdp.runtime.preflight import is_loopback


def use_address(ip: str, several_hosts: bool, tell: Callable[[str], None]) -> None:
    """Has Gloo listen on `ip`, instead of on what this host's name happens to stand for.

    By name, the processes of one host can be open to the network, or those of two hosts bound to
    loopback, where they never meet.  JAX has no option for it: its factory of CPU devices is
    replaced by one that calls the same functions with one more argument.  Called before JAX's
    backends start.

    Args:
      ip: at which the other processes reach this one.
      several_hosts: whether they are on several.
      tell: is given a warning where this version of JAX cannot do it.

    Raises:
      UserError: it cannot, and by name they would not meet.
    """
    import jax

    if jax.config.values.get("jax_cpu_collectives_implementation") not in (None, "gloo"):
        return  # the user's choice: MPI finds its own way
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        _replace_factory(ip)
    except (ImportError, AttributeError, TypeError) as error:
        by_name = _address_of_name()
        if several_hosts and is_loopback(by_name):
            raise UserError(
                f"this host, {socket.gethostname()}, is {by_name} to itself, where other hosts "
                "cannot reach it; give it its address in /etc/hosts"
            ) from error
        if by_name != ip:
            tell(f"warning: collectives listen on {by_name} (jax {jax.__version__}: {error})")


def _replace_factory(ip: str) -> None:
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax

    make: Callable[..., Any] = xla_bridge.make_cpu_client
    gloo: Callable[..., Any] = _jax.make_gloo_tcp_collectives
    if "collectives" not in inspect.signature(make).parameters:
        raise TypeError("make_cpu_client takes no collectives")
    if "hostname" not in (gloo.__doc__ or ""):  # a native function: its signature stands there
        raise TypeError("make_gloo_tcp_collectives takes no hostname")

    def client() -> Any:
        joined = distributed.global_state.client
        return make(collectives=gloo(distributed_client=joined, hostname=ip))

    xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)


def _address_of_name() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
