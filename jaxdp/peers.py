"""What the processes of a job tell each other besides gradients: decisions, one for all.

They go through the coordination service of `jax.distributed`, not through the devices: that works
before a device is touched, and while the devices are busy.  Every process must make the same calls
in the same order, on its main thread.  In a job of one process each does what it says at once.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

from jax._src import distributed  # the service itself; public is only what starts the devices

from jaxdp import errors

T = TypeVar("T")

_WAIT_MS = 600_000  # for what another process does meanwhile, such as reading a slow disk
_calls = itertools.count()  # the same in all processes: the names under which they meet


def joined() -> int:
    """How many processes the job has; starts no device, as `jax.process_count` would."""
    return distributed.global_state.num_processes or 1


def is_first() -> bool:
    """Whether this is the process that writes and speaks for all; starts no device."""
    return not distributed.global_state.process_id


def from_first(make: Callable[[], T]) -> T:
    """What `make` returns in process 0, in every process; there alone it is called.

    Args:
      make: returns a JSON value.

    Raises:
      JaxdpError: as `make` raised it, in every process.
    """
    if joined() == 1:
        return make()
    key = f"jaxdp/{next(_calls)}"
    client = _client()
    if not is_first():
        return _opened(client.blocking_key_value_get(key, _WAIT_MS))
    try:
        value = make()
    except errors.JaxdpError as error:
        client.key_value_set(key, json.dumps({"error": type(error).__name__, "text": str(error)}))
        raise
    client.key_value_set(key, json.dumps({"value": value}))
    return json.loads(json.dumps(value))  # as the others get it: lists for tuples


def from_all(value: Any) -> list[Any]:
    """The JSON value of every process, by the processes' numbers."""
    if joined() == 1:
        return [value]
    key, client = f"jaxdp/{next(_calls)}", _client()
    client.key_value_set(f"{key}/{distributed.global_state.process_id}", json.dumps(value))
    found = (client.blocking_key_value_get(f"{key}/{r}", _WAIT_MS) for r in range(joined()))
    return [json.loads(text) for text in found]


def left_by_all(name: str, value: Any) -> list[Any] | None:
    """Leaves a JSON value under a name, and takes what the others left there last: nobody waits.

    Unlike the rest it need not be called in step with the others.

    Returns:
      The value of every process, by the processes' numbers; None except in process 0, until all
      have left one, and in a job of one process.
    """
    if joined() == 1:
        return None
    folder, client = f"jaxdp/{name}/", _client()
    own = f"{folder}{distributed.global_state.process_id}"
    client.key_value_set(own, json.dumps(value), allow_overwrite=True)
    if not is_first():
        return None
    left = {int(key.rsplit("/", 1)[1]): text for key, text in client.key_value_dir_get(folder)}
    return [json.loads(left[r]) for r in range(joined())] if len(left) == joined() else None


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None  # who has joined has one
    return client


def _opened(text: str) -> Any:
    told = json.loads(text)
    if "error" not in told:
        return told["value"]
    kind = getattr(errors, told["error"], errors.JaxdpError)
    error = kind(*told["text"].splitlines())
    error.told_by_first = True
    raise error
