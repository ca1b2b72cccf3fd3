"""Choosing devices."""

import subprocess
import sys

import jax
import pytest

import jaxdp
from jaxdp.errors import UserError
from jaxdp.mesh import use_devices

HERE = len(jax.devices())


def test_n1_devices_asked_for_too_late():
    with pytest.raises(UserError, match=f"after JAX had started with {HERE}.*restart Python") as e:
        jaxdp.emulate(HERE + 1)
    assert len(e.value.lines) == 1
    with pytest.raises(UserError, match="after JAX had started"):
        use_devices(HERE + 1)
    jaxdp.emulate(HERE)  # what is there already may be asked for again
    assert use_devices(2) == jax.devices()[:2]
    assert use_devices("auto") == jax.devices()


def test_more_than_can_work_are_refused_before_they_take_the_memory():
    for choose in (jaxdp.emulate, use_devices):
        with pytest.raises(UserError, match="999999999 cannot be emulated; expected at most 128"):
            choose(999999999)


@pytest.mark.parametrize("n", [0, -1, "a", 2.5, None])
def test_no_devices(n):
    with pytest.raises(UserError, match="at least 1"):
        jaxdp.emulate(n)


@pytest.mark.parametrize("flags", ["", "--xla_force_host_platform_device_count=5"])
def test_emulation_before_jax_starts(flags):
    code = "import jaxdp, jax; jaxdp.emulate(3); print(len(jax.devices()))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"XLA_FLAGS": flags, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "3"
