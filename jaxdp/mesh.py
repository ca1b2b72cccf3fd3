"""Devices: how many there are, how to emulate more, and the one place that maps code over them."""

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp import peers
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
    have = len(jax.local_devices(backend="cpu"))
    if have != n:
        raise _too_late(n, have)


def use_devices(count: int | str, cpu_default: int | None = None) -> list[Device]:
    """The devices to train on, process by process, emulated where the platform is the CPU.

    Args:
      count: a number, over all processes, each of which gives as many; or "auto" for all there are.
      cpu_default: what "auto" emulates where there is only the CPU; None: what JAX has.

    Raises:
      UserError: there are fewer, or they cannot be spread over the processes.
    """
    if count == "auto":
        if cpu_default is not None:
            _set_cpu_devices(cpu_default)
        return _devices()
    n, processes = int(count), peers.joined()
    if n % processes:
        raise UserError(
            f"devices: {n} cannot be spread over {processes} processes; expected a multiple of "
            f"{processes}, or another number of processes"
        )
    each = n // processes
    # concerns the CPU alone: harmless where there are accelerators
    _set_cpu_devices(min(each, MAX_EMULATED))
    devices = _devices()
    chosen = _of_each_process(devices, each)
    if len(chosen) == n:
        return chosen
    if devices[0].platform == "cpu":
        raise _too_many(n) if each > MAX_EMULATED else _too_late(n, len(devices), each)
    raise UserError(
        f"devices: {n} were asked for, found: "
        f"{counted(len(devices), f'{devices[0].platform} device')}; "
        f"ask for at most {len(devices)}, or set JAX_PLATFORMS=cpu to emulate {n}"
    )


def _of_each_process(devices: Sequence[Device], each: int) -> list[Device]:
    """The first so many of every process: a process without any would have nothing to wait for."""
    numbers = sorted({device.process_index for device in devices})
    own = ((d for d in devices if d.process_index == number) for number in numbers)
    return [device for some in own for device in islice(some, each)]


def _devices() -> list[Device]:
    try:
        # process by process, so that the rows of each are neighbours
        return sorted(jax.devices(), key=lambda device: device.process_index)
    except RuntimeError as error:  # JAX_PLATFORMS names what is not here
        raise UserError(f"devices: JAX cannot start: {str(error).splitlines()[0]}") from error


def _set_cpu_devices(n: int) -> None:
    # refused once the backends have started: the caller then counts what is there
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", n)


def _too_many(n: int) -> UserError:
    return UserError(f"devices: {n} cannot be emulated; expected at most {MAX_EMULATED}")


def _too_late(n: int, have: int, each: int | None = None) -> UserError:
    return UserError(
        f"devices: {n} were asked for after JAX had started with {have}; devices are emulated "
        f"before JAX's first computation: restart Python (in a notebook, the kernel) and begin "
        f"with jaxdp.emulate({each or n})"
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
    """`tree` with every leaf whole on every device; see `place`."""
    return place(tree, NamedSharding(mesh, P()))


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Arrays of which this process has all of each, spread as `sharding` says.

    In a job of several processes each takes what its devices hold from its own arrays, and nobody
    compares these: `device_put` would, leaf by leaf, in a collective that nobody asked for and that
    names no leaf.  The guard compares what is replicated.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def one(x: Any) -> jax.Array:
        x = np.asarray(x)
        x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(one, tree)


def place_own(mesh: Mesh, tree: Any, dim: int) -> Any:
    """Host arrays that are this process's part of global ones, cut over the mesh along `dim`.

    Args:
      mesh: of one axis.
      tree: NumPy arrays; along `dim` they hold what this process's devices hold, in the order of
        the mesh, all devices equally much.
      dim: the dim that is cut.
    """
    sharding = NamedSharding(mesh, P(*[None] * dim, AXIS))
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    own = len(own_positions(mesh))

    def one(x: np.ndarray) -> jax.Array:
        shape = (*x.shape[:dim], x.shape[dim] // own * mesh.size, *x.shape[dim + 1 :])
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree.map(one, tree)


@cache
def own_positions(mesh: Mesh) -> tuple[int, ...]:
    """Which devices of the mesh, by number, are this process's."""
    here = jax.process_index()
    return tuple(i for i, device in enumerate(mesh.devices.flat) if device.process_index == here)


def rows_of(own: Sequence[int], devices: int, size: int, parts: int = 1) -> np.ndarray:
    """Which rows of a batch some devices work on: of every part, each device has its stretch.

    Args:
      own: the devices, by number, of `devices`.
      size: rows of the batch, divisible by parts x devices.
      parts: into how many the batch is cut first.

    Returns:
      int64, part by part, device by device.
    """
    return np.arange(size).reshape(parts, devices, -1)[:, list(own)].reshape(-1)


def everywhere(mesh: Mesh, tree: Any) -> Any:
    """Global arrays with every leaf made whole on every device, so that any process can read it.

    A collective: all processes call it.
    """
    return _everywhere(mesh)(tree)


@cache
def _everywhere(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))
