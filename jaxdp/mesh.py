"""Devices: how many there are, how to emulate more, and the one place that maps code over them."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.errors import UserError
from jaxdp.types import Device
from jaxdp.wording import counted

AXIS = "data"  # the mesh axis of every data-parallel program
# XLA:CPU's devices wait for each other in one pool of threads: 300 of them hung, 128 work
MAX_EMULATED = 128


def overlaps(platform: str) -> bool:
    """Whether a platform computes while it communicates: XLA's CPU one does one after the other."""
    return platform != "cpu"


def emulate(n: int) -> None:
    """Makes the CPU appear as `n` devices, so that N-device programs run on a laptop.

    They share the machine's cores and memory: right results, no measure of a network.

    Raises:
      UserError: `n` is no number of devices, or JAX has already started with another.
    """
    if not isinstance(n, int) or n < 1:
        raise UserError(f"devices: {n!r} cannot be emulated; expected a whole number of at least 1")
    if n > MAX_EMULATED:
        raise _too_many(n)
    _set_cpu_devices(n)
    have = len(jax.devices("cpu"))
    if have != n:
        raise _too_late(n, have)


def use_devices(count: int | str, cpu_default: int | None = None) -> list[Device]:
    """The devices to train on, emulated where the platform is the CPU.

    Args:
      count: a number, or "auto" for all there are.
      cpu_default: what "auto" emulates where there is only the CPU; None: what JAX has.

    Raises:
      UserError: there are fewer.
    """
    if count == "auto":
        if cpu_default is not None:
            _set_cpu_devices(cpu_default)
        return _devices()
    n = int(count)
    _set_cpu_devices(
        min(n, MAX_EMULATED)
    )  # concerns the CPU alone: harmless where there are accelerators
    devices = _devices()
    if len(devices) >= n:
        return devices[:n]
    if devices[0].platform == "cpu":
        raise _too_many(n) if n > MAX_EMULATED else _too_late(n, len(devices))
    raise UserError(
        f"devices: {n} were asked for, found: "
        f"{counted(len(devices), f'{devices[0].platform} device')}; "
        f"ask for at most {len(devices)}, or set JAX_PLATFORMS=cpu to emulate {n}"
    )


def _devices() -> list[Device]:
    try:
        return jax.devices()
    except RuntimeError as error:  # JAX_PLATFORMS names what is not here
        raise UserError(f"devices: JAX cannot start: {str(error).splitlines()[0]}") from error


def _set_cpu_devices(n: int) -> None:
    # refused once the backends have started: the caller then counts what is there
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", n)


def _too_many(n: int) -> UserError:
    return UserError(f"devices: {n} cannot be emulated; expected at most {MAX_EMULATED}")


def _too_late(n: int, have: int) -> UserError:
    return UserError(
        f"devices: {n} were asked for after JAX had started with {have}; devices are emulated "
        f"before JAX's first computation: restart Python (in a notebook, the kernel) and begin "
        f"with jaxdp.emulate({n})"
    )


def data_mesh(devices: Sequence[Device]) -> Mesh:
    """A mesh of one axis, `AXIS`, over `devices` in their order."""
    return Mesh(np.asarray(devices), (AXIS,), axis_types=(AxisType.Auto,))


def on_mesh(
    body: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
) -> Callable[..., Any]:
    """`body` run by every device of `mesh` on its shard: the only caller of `shard_map`.

    With `check_vma=False` gradients inside are the device's own until *we* reduce them, once, and
    psum and a ppermute ring are interchangeable.  The price: nobody but us checks that what leaves
    through `P()` is equal on all devices.
    """
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """`tree` with every leaf whole on every device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))
