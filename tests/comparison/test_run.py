"""A comparison in this process, and what it makes of wrong results."""

import json

import jax
import numpy as np
import pytest

from jaxdp import data_mesh, run_compare
from jaxdp.collectives import ALGORITHMS, Links, tuning
from jaxdp.collectives.table import Algorithm
from jaxdp.comparison import fastest, files, text
from jaxdp.comparison.network import fit_line
from jaxdp.comparison.run import Comparison
from jaxdp.errors import UserError

FIELDS = {
    "op", "redop", "algorithm", "bytes", "count", "dtype", "time_us", "time_us_p99", "algbw_gbps",
    "busbw_gbps", "wrong",
}  # fmt: skip


def compare(**options):
    given = {"algorithms": ["psum", "ring"], "sizes": [400, 4000], "iters": 3, "fit": False}
    return run_compare(jax.devices()[:3], **(given | options))


def test_rows(tmp_path):
    seen = []
    found = compare(fit=True, on_row=seen.append)
    assert found.rows == seen
    assert [(row["algorithm"], row["bytes"]) for row in found.rows] == [
        ("psum", 400), ("ring", 400), ("psum", 4000), ("ring", 4000),
    ]  # fmt: skip
    for row in found.rows:
        assert row.keys() >= FIELDS
        assert row["wrong"] == 0
        assert len(row["samples_us"]) == 3
        assert row["time_us"] == pytest.approx(np.median(row["samples_us"]), abs=1e-2)
        assert row["algbw_gbps"] == pytest.approx(row["bytes"] / row["time_us"] / 1000)
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * 4 / 3)
        assert (row["predicted_us"] is None) == (row["algorithm"] == "psum")
    files.write_json(found, str(tmp_path / "c.json"))
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["rows"][0]["bytes"] == 400
    assert saved["environment"]["emulated"]
    assert saved["model"]["links"]["alpha"] >= 0
    files.write_csv(found, str(tmp_path / "c.csv"))
    assert len((tmp_path / "c.csv").read_text().splitlines()) == 5
    assert "3 emulated devices in one process: shared memory, not a network" in text.facts_line(
        found.facts
    )
    assert "out of bounds values: 0 OK" in list(text.footer(found))
    assert sum(line.startswith("best at") for line in text.footer(found)) == 2


def test_on_one_device_nothing_is_best():
    found = run_compare(jax.devices()[:1], algorithms=["psum", "ring"], sizes=[400], iters=1)
    lines = list(text.footer(found))
    assert lines[0] == "one device sends nothing: no algorithm is better than another"
    assert not any("best" in line or "crossover" in line for line in lines)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_everything_that_exists_is_right(op, few):
    for dtype in few(["float32", "bfloat16", "int32"], 1):
        found = run_compare(
            jax.devices()[:4], op=op, dtype=dtype, sizes=[4 * 101], iters=1, warmup=0, fit=False
        )
        assert len(found.rows) > 2
        assert found.wrong == 0


def test_wrong_results_and_replicas_that_disagree_are_counted(monkeypatch):
    def one_rank_differs(x, axis_name, op):
        return jax.lax.psum(x, axis_name) + (jax.lax.axis_index(axis_name) == 1)

    broken = Algorithm("broken", functions={"all_reduce": one_rank_differs})
    monkeypatch.setitem(ALGORITHMS, "broken", broken)
    found = compare(algorithms=["psum", "broken"], sizes=[400])
    assert [row["wrong"] for row in found.rows] == [0, 100]  # every element of one rank
    assert any("out of bounds values: 100 FAILED" in line for line in text.footer(found))
    assert [row["algorithm"] for row in text.best_per_size(found.rows).values()] == ["psum"]


def test_best_and_crossovers():
    times = {
        ("a", 1): 5.0,
        ("b", 1): 7.0,
        ("a", 2): 9.0,
        ("b", 2): 8.0,
        ("a", 4): 9.5,
        ("b", 4): 8.5,
    }
    rows = [
        {
            "algorithm": name,
            "bytes": size,
            "arrays": 1,
            "time_us": time,
            "wrong": 0,
            "busbw_gbps": 1.0,
        }
        for (name, size), time in times.items()
    ]
    assert [row["algorithm"] for row in text.best_per_size(rows).values()] == ["a", "b", "b"]
    assert "crossover between 1 bytes and 2 bytes: a -> b" in list(
        text.footer(Comparison(rows, None))
    )


def test_fit_finds_the_line_again(rng):
    sizes = 4.0 ** np.arange(5, 12)
    alpha, beta = 40e-6, 0.3e-9
    noise = rng.uniform(0.98, 1.02, len(sizes))
    found = fit_line(sizes, (alpha + beta * sizes) * noise)
    assert found == pytest.approx((alpha, beta), rel=0.1)
    for times in ([2.0, 1.0], [1.0, 9.0]):  # neither is ever negative
        assert min(fit_line([1, 2], times)) >= 0
    assert Links(*found).message_s(0, 1, 1000) == pytest.approx(alpha + 1000 * beta, rel=0.1)


def test_mistakes():
    with pytest.raises(UserError) as error:
        compare(algorithms=["psum", "rng", "nccl"])
    assert len(error.value.lines) == 2
    assert "rng is not known for all_reduce; expected some of psum, ring" in error.value.lines[0]
    with pytest.raises(UserError, match="tree is not known for all_gather"):
        compare(op="all_gather", algorithms=["tree"])


def test_fastest_is_one_of_those_measured():
    choice = fastest(jax.devices()[:2], 4096)
    assert choice.algorithm in ALGORITHMS
    assert "measured at the start" in choice.reason


class TestAuto:
    """What `auto` comes to, on a platform of several processes."""

    @pytest.fixture(autouse=True)
    def two_processes(self, monkeypatch, tmp_path):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    ROWS = (
        {"bytes": 1024, "algorithm": "ring", "time_us": 5.0, "wrong": 1},
        {"bytes": 1024, "algorithm": "tree", "time_us": 9.0, "wrong": 0},
        {"bytes": 1024, "algorithm": "psum", "time_us": 9.5, "wrong": 0},
        {"bytes": 16384, "algorithm": "ring", "time_us": 9.0, "wrong": 0},
    )

    def test_one_cpu_process_needs_no_table(self, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: 1)
        assert tuning.choose(1024, 4).algorithm == "psum"
        assert tuning.choose(1024, 4).reason.endswith("shared memory, which nothing beats")

    def test_a_table_that_is_not_needed_is_said_to_be_unread(self, monkeypatch, tmp_path):
        (tmp_path / "t.json").write_text("garbage")
        monkeypatch.setattr(jax, "process_count", lambda: 1)
        for n in (1, 4):
            reason = tuning.choose(1024, n, tmp_path / "t.json").reason
            assert reason.endswith(f"; {tmp_path / 't.json'} is not read")

    def test_nothing_measured_is_psum(self):
        assert tuning.choose(1024, 4).algorithm == "psum"
        assert "jaxdp.compare --tune" in tuning.choose(1024, 4).reason

    def test_nothing_measured_in_a_job_of_several_processes(self, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        assert "sync.tune start" in tuning.choose(1024, 4).reason
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        reason = tuning.choose(1024, 4).reason
        assert "sync.tune start" in reason
        assert "compare" not in reason  # which cannot measure them

    def test_the_nearest_size_that_was_right_decides(self):
        path = tuning.save(self.ROWS, 4)
        assert path == tuning.default_file()
        chosen = [tuning.choose(size, 4).algorithm for size in (1, 1024, 4000, 4200, 1 << 30)]
        assert chosen == ["tree", "tree", "tree", "ring", "ring"]
        assert tuning.choose(1024, 8).algorithm == "psum"  # measured for four ranks only

    def test_psum_stays_where_the_gain_may_be_luck(self):
        def rows(*ring):
            times = {"psum": (9.0, 10.0, 11.0, 12.0), "ring": ring}
            return [
                {
                    "bytes": 1024,
                    "algorithm": name,
                    "time_us": float(np.median(samples)),
                    "samples_us": samples,
                    "wrong": 0,
                }
                for name, samples in times.items()
            ]

        tuning.save(rows(5.0, 8.0, 11.0, 14.0), 4)
        assert tuning.choose(1024, 4).algorithm == "psum"
        tuning.save(rows(5.0, 6.0, 7.0, 8.0), 4)
        assert tuning.choose(1024, 4).algorithm == "ring"

    def test_auto_is_measured_and_never_chosen(self):
        auto = {"bytes": 1024, "algorithm": "auto", "time_us": 1.0, "wrong": 0}
        tuning.save((auto, *self.ROWS), 4)
        assert tuning.choose(1024, 4).algorithm == "tree"

    def test_entries_of_others_stay(self):
        tuning.save(self.ROWS, 4)
        tuning.save(self.ROWS[3:], 8)
        assert tuning.choose(1024, 4).algorithm == "tree"
        assert tuning.choose(1024, 8).algorithm == "ring"

    def test_other_versions_are_not_believed(self, monkeypatch):
        tuning.save(self.ROWS, 4)
        monkeypatch.setattr(tuning, "version", lambda name: "0.0.1")
        assert tuning.choose(1024, 4).algorithm == "psum"
        assert "tune again" in tuning.choose(1024, 4).reason

    @pytest.mark.parametrize(
        "content", ["", "{", "[]", '{"format": 1}', '{"format": 9, "entries": {}}']
    )
    def test_a_damaged_file_is_one_line(self, content, tmp_path):
        path = tmp_path / "tune.json"
        path.write_text(content)
        with pytest.raises(UserError, match="not a tuning file") as error:
            tuning.choose(1024, 4, path)
        assert len(error.value.lines) == 1
        with pytest.raises(UserError, match="no such tuning file"):
            tuning.choose(1024, 4, tmp_path / "other.json")

    def test_auto_runs_what_was_chosen(self):
        from jax.sharding import PartitionSpec as P

        from jaxdp import all_reduce, on_mesh

        tuning.save(self.ROWS, 4)
        mesh = data_mesh(jax.devices()[:4])
        x = np.arange(4 * 4096, dtype=np.float32).reshape(4, -1)
        run = jax.jit(
            on_mesh(lambda x: all_reduce(x, "data", algorithm="auto"), mesh, P("data"), P("data"))
        )
        assert (run.lower(x).compile().as_text() or "").count("collective-permute(") == 6
