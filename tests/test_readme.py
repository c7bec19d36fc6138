"""README.md: its examples run as they stand, and its table of implementations is the real one."""

import re
from pathlib import Path

import jax
import pytest

import jax_ssd

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = dict(re.findall(r"## In (\w+)\n\n```python\n(.*?)```", README, re.DOTALL))


def test_both_frameworks_have_an_example():
    assert set(EXAMPLES) == {"JAX", "PyTorch"}


@pytest.mark.parametrize("framework", sorted(EXAMPLES))
def test_example_runs_and_prints_shapes(framework, capsys):
    if framework == "PyTorch":
        pytest.importorskip("torch")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(EXAMPLES[framework], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    promised = re.search(r"print\(.*\)  # (.*)", EXAMPLES[framework])
    assert promised and printed.strip() == promised.group(1)


def test_table_names_the_implementations():
    named = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert tuple(named) == tuple(jax_ssd.implementations())


def test_linked_files_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert [link for link in links if not (ROOT / link).is_file()] == []
