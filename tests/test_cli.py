"""The command line: what it prints and what it returns."""

import importlib.util
import subprocess
import sys

import jax
import pytest

import jax_ssd
from jax_ssd import cli

OPS = ("chunk_scan", "prefill", "selective_state_update", "replay_update")


def without(monkeypatch, *packages):
    """Make `packages` look as if they were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in packages else find(name))


@pytest.mark.parametrize("drawn", [True, False], ids=["rich", "plain"])
def test_info_says_versions_devices_and_verdicts(drawn, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    if drawn:
        pytest.importorskip("rich")
    else:
        without(monkeypatch, "rich")
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    expected = (*OPS, *jax_ssd.implementations(), "jaxlib", jax.__version__, jax.devices()[0].platform)
    assert [word for word in expected if word not in printed] == []
    assert printed.count("chosen") == len(OPS)


def test_info_gives_a_reason_for_every_refusal():
    rows = cli.verdict_table().rows
    assert all(reason for _, _, answer, reason in rows if answer == "no")
    assert {name for _, name, _, _ in rows} >= set(jax_ssd.implementations())


def test_missing_package_is_said_not_raised():
    assert cli.installed_version("no-such-package-is-installed") == "not installed"


def test_plain_table_aligns_columns():
    table = cli.Table("Title", ("a", "head"), [("long cell", "x"), ("b", "y")])
    assert cli.plain_text(table) == "Title\n  a          head\n  long cell  x\n  b          y"


def test_demo_names_the_extras_it_needs(monkeypatch, capsys):
    without(monkeypatch, "optax")
    assert cli.main(["demo"]) == 2
    message = capsys.readouterr().err
    assert "optax" in message and "jax-ssd[flax,bench]" in message


def test_demo_passes_its_options_on(capsys):
    pytest.importorskip("flax")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", "--help"])
    assert stopped.value.code == 0
    assert "usage: jax-ssd demo" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["dance"], ["info", "--loud"]], ids=["none", "unknown", "option"])
def test_wrong_command_is_a_usage_error(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: jax-ssd" in capsys.readouterr().err


def test_runs_as_a_module():
    command = [sys.executable, "-m", "jax_ssd", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"jax-ssd {jax_ssd.__version__}"
