"""Trains a small byte-level Mamba-2 on Python's reference, then decodes with three kinds of cache."""

import argparse
import dataclasses
import functools
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jax_ssd import SeedStream, StochasticRounding
from jax_ssd.models import LanguageModel, Mamba2Config, generate, init_cache, save_checkpoint

# Stands before every document, so that its first byte is predicted from something; never a target.
START = 0
KNOWN_WORDS_NEEDED = 0.7
PROMPTS = ("The value of an expression ", "A class definition ", "The function returns ", "If an object ")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to do: training ends, and its learning rate with it, when either steps or seconds run out."""

    steps: int = 800
    seconds: float = 120.0
    batch: int = 4
    context: int = 256
    learning_rate: float = 6e-3
    width: int = 128
    num_layers: int = 2
    held_out_bytes: int = 2048
    generated_bytes: int = 400


QUICK = Plan(
    steps=12,
    seconds=10.0,
    batch=4,
    context=128,
    width=32,
    num_layers=1,
    held_out_bytes=64,
    generated_bytes=32,
)


class CacheKind(NamedTuple):
    """A row of the table: what the state is stored as, and how it is rounded."""

    name: str
    dtype: Any
    stochastic: bool


CACHES = (
    CacheKind("float32", jnp.float32, False),
    CacheKind("float16, to nearest", jnp.float16, False),
    CacheKind("float16, stochastic", jnp.float16, True),
)


class Documents(NamedTuple):
    """Training and held-out documents, bytes each."""

    train: list[bytes]
    held_out: list[bytes]


class Row(NamedTuple):
    """One cache's figures; `difference` is ||logits - chunk_scan's|| / ||chunk_scan's||."""

    name: str
    bits: float
    difference: float
    speed: float
    texts: list[str]


def load_documents() -> Documents:
    """The language reference as documents; in alphabetical order, topics 5, 13, 21 and so on are held out.

    Topics repeat each other's sections, so a paragraph of 40 characters or more counts once, in the first
    topic that has it: nothing held out occurs in the training text.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents = []
    for name in sorted(topics):
        kept = []
        for paragraph in topics[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if len(key) < 40 or key not in seen:
                kept.append(paragraph)
            seen.add(key)
        documents.append("\n\n".join(kept).replace("\0", " ").encode())
    return Documents([d for i, d in enumerate(documents) if i % 8 != 4], documents[4::8])


class WittenBell:
    """A byte model of order 2: each order mixes its counts with the next lower one, down to uniform.

        P(c | context) = (count(context c) + T(context) P(c | shorter)) / (count(context) + T(context))

    T is the number of different bytes seen after the context. Source: Witten and Bell 1991.
    """

    def __init__(self, documents: Sequence[bytes]):
        a, b, c = _trigrams(documents)
        self._low = _mix(np.bincount(c, minlength=256)[None], np.full((1, 256), 1 / 256))
        self._middle = _mix(np.bincount(b * 256 + c, minlength=1 << 16).reshape(256, 256), self._low)
        self._high = np.bincount((a * 256 + b) * 256 + c, minlength=1 << 24).reshape(1 << 16, 256)

    def bits_per_byte(self, documents: Sequence[bytes]) -> float:
        """Mean of -log2 P over every byte of the documents."""
        a, b, c = _trigrams(documents)
        context = a * 256 + b
        counts = self._high[context]
        mixed = _mix(counts, self._middle[b])
        return float(-np.log2(mixed[np.arange(c.size), c]).mean())


def _trigrams(documents):
    """Every byte with the two before it; the first ones follow START."""
    padded = [np.frombuffer(bytes([START, START]) + document, np.uint8).astype(np.int64) for document in documents]
    return tuple(np.concatenate([d[i : d.size - 2 + i] for d in padded]) for i in range(3))


def _mix(counts, lower):
    """Witten-Bell's mixture of counts (contexts, 256) with the lower order's probabilities."""
    kinds = np.count_nonzero(counts, axis=1, keepdims=True)
    total = counts.sum(axis=1, keepdims=True) + kinds
    return np.where(total > 0, (counts + kinds * lower) / np.maximum(total, 1), lower)


def make_config(plan: Plan) -> Mamba2Config:
    """A model of about 400,000 parameters in the full plan."""
    return Mamba2Config(
        vocab_size=256,
        hidden_size=plan.width,
        num_layers=plan.num_layers,
        num_heads=2 * plan.width // 64,
        headdim=64,
        dstate=64,
    )


def bits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log2 P of each target."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets) / math.log(2)


def make_optimizer() -> optax.GradientTransformation:
    """AdamW without its learning rate, which each step is given."""

    def matrices(params):
        return jax.tree.map(lambda value: value.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95), optax.add_decayed_weights(0.1, matrices)
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def train_step(graphdef, optimizer, params, moments, tokens, documents, rate):
    """One step on windows (b, t + 1) of the stream; state and convolution restart at every document."""

    def loss(params):
        logits = nnx.merge(graphdef, params)(tokens[:, :-1], seq_idx=documents[:, :-1])
        counted = tokens[:, 1:] != START
        return jnp.sum(bits(logits, tokens[:, 1:]), where=counted) / jnp.sum(counted, dtype=jnp.float32)

    value, gradient = jax.value_and_grad(loss)(params)
    updates, moments = optimizer.update(gradient, moments, params)
    updates = jax.tree.map(lambda update: -rate * update, updates)
    return optax.apply_updates(params, updates), moments, value


def learning_rate(plan: Plan, step: int, elapsed: float) -> float:
    """A short warm-up, then half a cosine over whatever runs out first, steps or time."""
    progress = min(1.0, max(step / plan.steps, elapsed / plan.seconds))
    warm_up = min(1.0, (step + 1) / (0.1 * plan.steps))
    return plan.learning_rate * warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: LanguageModel, documents: Sequence[bytes], plan: Plan, console: Console) -> list[float]:
    """Trains the model in place; bits a byte of every step."""
    stream = np.frombuffer(b"".join(bytes([START]) + document for document in documents), np.uint8).astype(np.int32)
    owner = np.cumsum(stream == START, dtype=np.int32)
    graphdef, params = nnx.split(model, nnx.Param)
    optimizer = make_optimizer()
    moments = optimizer.init(params)
    rng = np.random.default_rng(0)
    losses: list[float] = []
    begin = time.perf_counter()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=plan.steps, loss="compiling")
        for step in range(plan.steps):
            elapsed = time.perf_counter() - begin
            if elapsed > plan.seconds:
                progress.update(task, total=step)
                break
            first = rng.integers(0, stream.size - plan.context, plan.batch)
            index = first[:, None] + np.arange(plan.context + 1)
            rate = jnp.float32(learning_rate(plan, step, elapsed))
            params, moments, loss = train_step(graphdef, optimizer, params, moments, stream[index], owner[index], rate)
            losses.append(float(loss))
            progress.update(task, advance=1, loss=f"{np.mean(losses[-20:]):.3f} bits a byte")
    nnx.update(model, params)
    return losses


def save_curve(losses: Sequence[float], baseline: float, held_out: float, path: Path) -> None:
    """The loss of every step, its running mean, and the two figures on held-out text, as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    span = min(20, len(losses))
    mean = np.convolve(losses, np.ones(span) / span, mode="valid")
    axes.plot(losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step")
    axes.plot(np.arange(span - 1, len(losses)), mean, color="tab:blue", label=f"training, mean of {span} steps")
    axes.axhline(baseline, color="tab:red", linestyle="--", label=f"held out, Witten-Bell order 2: {baseline:.3f}")
    axes.axhline(held_out, color="tab:green", linestyle="--", label=f"held out, this model: {held_out:.3f}")
    axes.set(xlabel="step", ylabel="bits a byte", ylim=(0, 8.2), title="A byte-level Mamba-2 on Python's reference")
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)


class HeldOut(NamedTuple):
    """The start of each held-out document as a row: inputs and targets (b, t), and which targets count."""

    inputs: jax.Array
    targets: jax.Array
    counted: jax.Array


def held_out_rows(documents: Sequence[bytes]) -> HeldOut:
    """Rows that begin with START, short ones padded."""
    length = max(map(len, documents))
    rows = np.zeros((len(documents), length + 1), np.int32)
    for row, document in zip(rows, documents, strict=True):
        row[1 : len(document) + 1] = np.frombuffer(document, np.uint8)
    counted = np.arange(length) < np.array([[len(document)] for document in documents])
    return HeldOut(jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, 1:]), jnp.asarray(counted))


def decode_all(model: LanguageModel, cache, inputs: jax.Array, rounding_key: jax.Array | None) -> jax.Array:
    """Logits (b, t, vocab) of rows (b, t), one `selective_state_update` a token and layer."""

    def body(cache, step_tokens):
        step, tokens = step_tokens
        rounding = None
        if rounding_key is not None:
            rounding = StochasticRounding(SeedStream(rounding_key, len(cache)).seeds(step))
        logits, cache = model.step(tokens, cache, rounding=rounding)
        return cache, logits

    _, logits = jax.lax.scan(body, cache, (jnp.arange(inputs.shape[1]), inputs.T))
    return logits.swapaxes(0, 1)


def measure(model: LanguageModel, rows: HeldOut, full: jax.Array, kind: CacheKind, plan: Plan) -> Row:
    """Decodes the held-out rows and generates from the prompts with one kind of cache."""
    rounding_key = jax.random.key(1) if kind.stochastic else None
    cache = init_cache(model.config, rows.inputs.shape[0], state_dtype=kind.dtype)
    compiled = jax.jit(decode_all).lower(model, cache, rows.inputs, rounding_key).compile()
    begin = time.perf_counter()
    logits = jax.block_until_ready(compiled(model, cache, rows.inputs, rounding_key))
    seconds = time.perf_counter() - begin
    error = jnp.where(rows.counted[..., None], logits - full, 0.0)
    size = jnp.linalg.norm(jnp.where(rows.counted[..., None], full, 0.0))
    return Row(
        kind.name,
        mean_bits(logits, rows),
        float(jnp.linalg.norm(error) / size),
        rows.inputs.size / seconds,
        write_texts(model, kind, plan, rounding_key),
    )


def mean_bits(logits: jax.Array, rows: HeldOut) -> float:
    """Bits a byte over the targets that count."""
    return float(jnp.mean(bits(logits, rows.targets), where=rows.counted))


def write_texts(model: LanguageModel, kind: CacheKind, plan: Plan, rounding_key: jax.Array | None) -> list[str]:
    """What the model adds to each prompt: one packed `prefill`, then decoding."""
    prompts = [bytes([START]) + prompt.encode() for prompt in PROMPTS]
    ends = np.cumsum([0, *map(len, prompts)], dtype=np.int32)
    tokens, _ = generate(
        model,
        init_cache(model.config, len(prompts), state_dtype=kind.dtype),
        jnp.asarray(np.frombuffer(b"".join(prompts), np.uint8).astype(np.int32)),
        cu_seqlens=jnp.asarray(ends),
        slots=jnp.arange(len(prompts), dtype=jnp.int32),
        num_tokens=plan.generated_bytes,
        key=jax.random.key(2),
        temperature=0.5,
        rounding_key=rounding_key,
    )
    return [readable(bytes(row.astype(np.uint8))) for row in np.asarray(tokens)]


def readable(text: bytes) -> str:
    """Text that a terminal can show: what is neither printable nor a line's end becomes a middle dot."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text.decode("utf-8", "replace"))


def known_words(texts: Sequence[str], vocabulary: set[str]) -> float:
    """The share of generated words in the vocabulary; a last word, perhaps cut short, does not count."""
    words = [word for text in texts for word in find_words(text[: max(text.rfind(" "), 0)])]
    return sum(word in vocabulary for word in words) / max(len(words), 1)


def find_words(text: str) -> list[str]:
    """Words of two letters and more, in lower case."""
    return re.findall(r"[a-z]{2,}", text.lower())


def failures(held_out: float, baseline: float, known: float) -> list[str]:
    """What the demo promises and did not reach, in words."""
    messages = []
    if not held_out < baseline:
        messages.append(f"{held_out:.3f} bits a byte on held-out text do not beat Witten-Bell's {baseline:.3f}")
    if not known >= KNOWN_WORDS_NEEDED:
        messages.append(f"only {known:.0%} of the generated words occur in the training text, not 70%")
    return messages


def print_table(rows: Sequence[Row], vocabulary: set[str], console: Console) -> None:
    """One line a cache."""
    table = Table(title="Decoding held-out text and prompts, by kind of state cache", title_justify="left")
    table.add_column("state cache", no_wrap=True)
    for head in ("bits a byte", "difference", "tokens a second", "words known"):
        table.add_column(head, justify="right")
    for row in rows:
        known = f"{known_words(row.texts, vocabulary):.1%}"
        table.add_row(row.name, f"{row.bits:.5f}", f"{row.difference:.1e}", f"{row.speed:,.0f}", known)
    console.print(table)


def run(plan: Plan, output: Path, console: Console) -> list[str]:
    """The demo itself; the promises that it did not keep."""
    documents = load_documents()
    counts = [sum(map(len, part)) for part in documents]
    console.print(
        f"Text: {len(documents.train)} topics of Python's reference to train on ({counts[0]:,} bytes), "
        f"{len(documents.held_out)} held out ({counts[1]:,} bytes)."
    )
    excerpts = [document[: plan.held_out_bytes] for document in documents.held_out]
    baseline = WittenBell(documents.train).bits_per_byte(excerpts)
    rows = held_out_rows(excerpts)
    model = LanguageModel(make_config(plan), rngs=nnx.Rngs(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    console.print(f"Model: {plan.num_layers} Mamba-2 layers of width {plan.width}, {size:,} parameters.")
    losses = train(model, documents.train, plan, console)
    full = jax.jit(lambda model, tokens: model(tokens))(model, rows.inputs)
    held_out = mean_bits(full, rows)
    output.mkdir(parents=True, exist_ok=True)
    save_curve(losses, baseline, held_out, output / "loss_curve.png")
    save_checkpoint(model, output / "model")
    console.print(f"Saved {output / 'loss_curve.png'} and {output / 'model'}.")
    with console.status("decoding token by token"):
        measured = [measure(model, rows, full, kind, plan) for kind in CACHES]
    vocabulary = set(find_words(b" ".join(documents.train).decode()))
    for prompt, text in zip(PROMPTS, measured[0].texts, strict=True):
        console.print(Text.assemble("\n", (prompt, "bold"), text))
    console.print()
    print_table(measured, vocabulary, console)
    console.print(
        f"Held-out text: the first {plan.held_out_bytes} bytes of each held-out topic, "
        f"{int(rows.counted.sum()):,} in all. One chunk_scan over them: {held_out:.5f} bits a byte; "
        f"Witten-Bell order 2: {baseline:.5f}. Difference: ||logits - chunk_scan's|| / ||chunk_scan's||."
    )
    worst = max(row.bits for row in measured)
    return failures(worst, baseline, min(known_words(row.texts, vocabulary) for row in measured))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; 0, or 1 where a promise was not kept.

    Args:
        argv: the arguments; the process's where None.
    """
    parser = argparse.ArgumentParser(prog="jax-ssd demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model; promises are not checked")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="where pictures and model go")
    arguments = parser.parse_args(argv)
    console = Console()
    begin = time.perf_counter()
    broken = run(QUICK if arguments.quick else Plan(), arguments.output, console)
    console.print(f"Took {time.perf_counter() - begin:.0f} s.")
    if arguments.quick:
        console.print("With --quick the model is hardly trained, so its figures are not checked.")
        return 0
    for message in broken:
        console.print(f"[bold red]Failed:[/bold red] {message}.")
    return 1 if broken else 0
