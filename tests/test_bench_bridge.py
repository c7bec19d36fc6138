"""The bridge's benchmark: right paths get figures, wrong and missing ones a reason."""

import pytest

torch = pytest.importorskip("torch")

from benchmarks import bridge as benchmark  # noqa: E402
from benchmarks import bridge_steps  # noqa: E402


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(benchmark, "CALLS", 2)
    monkeypatch.setattr(benchmark, "SAMPLES", 2)


@pytest.mark.parametrize("case", benchmark.CASES, ids=lambda case: case.name)
def test_right_paths_are_measured(case, monkeypatch):
    monkeypatch.setattr(benchmark, "ROUTES", benchmark.ROUTES[:3])
    rows = {row["path"]: row for row in benchmark.run(case, "cpu")}
    assert set(rows) == {"public DLPack", "torch_call", "wrap"}
    assert all(row["median_us"] >= row["least_us"] > 0 for row in rows.values())


def test_wrong_and_missing_paths_get_no_figure(monkeypatch):
    def absent():
        raise ModuleNotFoundError("No module named 'absent'", name="absent")

    routes = (
        benchmark.Route("public DLPack", benchmark.public),
        benchmark.Route("wrong", lambda: lambda *tensors: (tensors[0], tensors[1])),
        benchmark.Route("absent", absent),
    )
    monkeypatch.setattr(benchmark, "ROUTES", routes)
    rows = {row["path"]: row for row in benchmark.run(benchmark.CASES[0], "cpu")}
    assert "median_us" in rows["public DLPack"]
    assert "Mismatched" in rows["wrong"]["reason"] or "not close" in rows["wrong"]["reason"]
    assert rows["absent"]["reason"] == "not installed (absent)"


def test_every_step_of_a_call_is_timed(monkeypatch):
    monkeypatch.setattr(bridge_steps, "CALLS", 2)
    monkeypatch.setattr(bridge_steps, "SAMPLES", 2)
    steps = bridge_steps.breakdown(benchmark.two_of_seven, benchmark.tensors_of(benchmark.CASES[0], "cpu"))
    assert len(steps) == len({name for name, _, _ in steps}) > 10
    assert all(median >= least > 0 for _, least, median in steps)
