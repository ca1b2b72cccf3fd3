"""A random few of the mutations of `mutations.py`, which tries a thousand."""

from importlib import util
from pathlib import Path

import pytest

spec = util.spec_from_file_location("mutations", Path(__file__).with_name("mutations.py"))
assert spec is not None
assert spec.loader is not None
mutations = util.module_from_spec(spec)
spec.loader.exec_module(mutations)

# Orbax's reader leaves callbacks behind when it fails, whose event loop is closed by then
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_no_mutation_is_silent_and_whole_steps_are_found(few, rng, tmp_path):
    trials = mutations.Trials(tmp_path, rng)
    for mutation in few(mutations.MUTATIONS * 4, 20):
        seed = int(rng.integers(2**32))
        verdict = trials.ours(mutation, seed)
        assert verdict in ("right", "step back"), (mutation.__name__, seed)


@pytest.mark.parametrize("broken", ["check", "check_same"])
def test_a_layer_that_is_switched_off_is_missed(broken, rng, tmp_path, monkeypatch):
    """The two layers of digests, each of which sees what the other cannot."""
    from jaxdp.checkpoints import files, leaves

    trials = mutations.Trials(tmp_path, rng)
    if broken == "check":
        monkeypatch.setattr(files, "check", lambda *args: None)
        monkeypatch.setattr(leaves, "check_same", lambda *args: None)
        assert trials.ours(mutations.data_of_the_step_before, 0) == "silent"
    else:
        monkeypatch.setattr(files, "check", lambda *args: None)
        assert trials.ours(mutations.data_of_the_step_before, 0) == "step back"
