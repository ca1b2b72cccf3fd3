"""What compression costs in accuracy: whole runs of a configuration, compressed and not.

    python tests/benchmarks/compression.py configs/digits_mlp.yaml [STEPS]

Bytes are those of the compiled step's results on one device, and what a device sends by the plan;
emulated devices show neither what compression saves on a network nor what it costs there.
"""

import sys
import tempfile
from pathlib import Path

import jax

from jaxdp import hlo, load_config, run_training
from jaxdp.assemble import assemble, load_data
from jaxdp.mesh import use_devices
from jaxdp.plan import as_planned

OPTIONS = (
    {},
    {"compression": "top_k", "top_k_fraction": 0.1},
    {"compression": "top_k", "top_k_fraction": 0.01},
    {"compression": "top_k", "top_k_fraction": 0.001},
    {"compression": "power_sgd", "power_sgd_rank": 4},
    {"compression": "power_sgd", "power_sgd_rank": 1},
)


def main(path: str, steps: int | None) -> None:
    """Trains with each option in turn, prints a row for each."""
    given = [] if steps is None else [("steps", steps)]
    print(f"jax {jax.__version__}, {path}, {load_config(path, given).steps} steps")
    for options in OPTIONS:
        keys = [(f"sync.{key}", value) for key, value in options.items()]
        with tempfile.TemporaryDirectory() as folder:
            config = load_config(path, [*given, *keys, ("out", str(Path(folder) / "run"))])
            job = assemble(config, load_data(config), use_devices(config.devices))
            state, batch = job.init(), job.step.place(job.loader.batch(0))
            found = hlo.collectives(job.step.run.lower(state, batch).compile().as_text() or "")
            plan = job.step.plan(state, batch)
            summary = run_training(config)
        print(
            f"{' '.join(map(str, options.values())) or 'uncompressed':16} found "
            f"{sum(c.result_bytes for c in found):>9,} B  sent {plan.sent_bytes:>9,} B  "
            f"{'as planned' if as_planned(plan, found) else 'not as planned'}  "
            + ", ".join(f"{k} {v:.4f}" for k, v in summary["eval"].items() if k != "weight"),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
