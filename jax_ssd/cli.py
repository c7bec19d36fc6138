"""The command `jax-ssd`: what is installed and which implementation serves which operation, and the demo."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_ssd

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "torch",
    "triton",
    "jax-triton",
    "flashinfer-python",
    "jax-tvm-ffi",
)
DEMO_PACKAGES = ("flax", "optax", "safetensors", "rich", "matplotlib")


class Table(NamedTuple):
    """A title, the heads of the columns and the rows."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]


def example_calls() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """One call an operation, of the sizes of a 30B hybrid model: 64 heads x 64 x 128, 8 groups, bfloat16."""
    num_tokens, batch, num_slots, num_heads, headdim, num_groups, dstate = 4096, 32, 64, 64, 64, 8, 128

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def tokens(*lead: int) -> tuple[Any, ...]:
        keys = shape(*lead, num_groups, dstate)
        A = shape(num_heads, dtype=jnp.float32)
        return shape(*lead, num_heads, headdim), shape(*lead, num_heads), A, keys, keys

    pool = shape(num_slots, num_heads, headdim, dstate, dtype=jnp.float16)
    packed = {
        "cu_seqlens": shape(5, dtype=jnp.int32),
        "slots": shape(4, dtype=jnp.int32),
        "has_initial_state": shape(4, dtype=jnp.bool_),
    }
    ring = jax.eval_shape(
        lambda state: jax_ssd.ReplayCache.from_state(state, ring_size=16, num_groups=num_groups, dtype=jnp.bfloat16),
        pool,
    )
    slots = shape(batch, dtype=jnp.int32)
    return {
        "chunk_scan": (tokens(1, num_tokens), {}),
        "prefill": ((pool, *tokens(num_tokens)), packed),
        "selective_state_update": ((pool, *tokens(batch)), {"read_slots": slots}),
        "replay_update": ((ring, *tokens(batch)), {"slots": slots}),
    }


def installed_version(package: str) -> str:
    """The version from the package's metadata, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def version_table() -> Table:
    rows = [("jax-ssd", jax_ssd.__version__), *((name, installed_version(name)) for name in PACKAGES)]
    return Table("Versions", ("package", "version"), rows)


def device_table() -> Table:
    rows = [
        (str(device.id), device.platform, device.device_kind, str(getattr(device, "compute_capability", "")))
        for device in jax.devices()
    ]
    return Table("Devices", ("id", "platform", "kind", "compute capability"), rows)


def verdict_table() -> Table:
    """What `explain` says of each example call, the implementation of its choice first."""
    rows = []
    for op, (args, kwargs) in example_calls().items():
        chosen = False
        for verdict in jax_ssd.explain(op, *args, **kwargs):
            served = verdict.reason is None
            answer = "chosen" if served and not chosen else "can serve" if served else "no"
            chosen = chosen or served
            rows.append((op, verdict.name, answer, verdict.reason or describe(verdict.configuration)))
            op = ""
    heads = ("operation", "implementation", "", "configuration, or the reason why not")
    return Table("Which implementation serves (64 heads x 64 x 128, 8 groups, bfloat16)", heads, rows)


def describe(configuration: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in configuration.items())


def plain_text(table: Table) -> str:
    """The table as aligned columns."""
    lines = [table.heads, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n  ".join((table.title, *rows))


def show(table: Table) -> None:
    """Print a table: drawn with rich where it is installed, else in plain text."""
    if importlib.util.find_spec("rich") is None:
        print(plain_text(table), end="\n\n")
        return
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(title=table.title, title_justify="left")
    for head in table.heads:
        drawn.add_column(head, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    Console().print(drawn)


def info(_: Sequence[str]) -> int:
    """`jax-ssd info`."""
    for table in (version_table(), device_table(), verdict_table()):
        show(table)
    return 0


def demo(options: Sequence[str]) -> int:
    """`jax-ssd demo`, whose options are the demo's own."""
    missing = [name for name in DEMO_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"The demo needs {', '.join(missing)}: pip install 'jax-ssd[flax,bench]'", file=sys.stderr)
        return 2
    from jax_ssd import demo as language_model_demo

    return language_model_demo.main(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, or the process's arguments; the exit status."""
    parser = argparse.ArgumentParser(prog="jax-ssd", description="State space duality (Mamba-2) in JAX and PyTorch.")
    parser.add_argument("--version", action="version", version=f"jax-ssd {jax_ssd.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="versions, devices, and which implementation serves which operation")
    text = "train a small language model on English text, then generate from it"
    commands.add_parser("demo", help=text, add_help=False)
    arguments, options = parser.parse_known_args(argv)
    if options and arguments.command != "demo":
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    return {"info": info, "demo": demo}[arguments.command](options)
