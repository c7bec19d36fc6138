"""The demo: its text, its baseline, its promises, and a quick run from end to end."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssd import demo
from jax_ssd.models import load_checkpoint
from tests.harness import FLOAT64
from tests.tolerances import check


def witten_bell_by_hand(train, text):
    """Bits a byte from dictionaries of counts, one byte at a time."""
    counts = collections.defaultdict(collections.Counter)
    for document in train:
        padded = bytes(2) + document
        for i in range(2, len(padded)):
            for order in range(3):
                counts[padded[i - order : i]][padded[i]] += 1

    def probability(context, byte, order):
        if order < 0:
            return 1 / 256
        seen = counts[context[len(context) - order :]]
        lower = probability(context, byte, order - 1)
        return (seen[byte] + len(seen) * lower) / (seen.total() + len(seen)) if seen else lower

    padded = bytes(2) + text
    return np.mean([-math.log2(probability(padded[i - 2 : i], padded[i], 2)) for i in range(2, len(padded))])


def test_witten_bell_equals_counting_by_hand():
    train = [b"abracadabra, said the magician", b"the cat sat on the mat"]
    for text in (b"the abracadabra cat", b"xyz", train[0]):
        found = demo.WittenBell(train).bits_per_byte([text])
        check(found, witten_bell_by_hand(train, text), FLOAT64, "value")


def test_held_out_topics_share_no_paragraph_with_the_training_text():
    documents = demo.load_documents()
    assert len(documents.train) > 6 * len(documents.held_out) > 0

    def paragraphs(part):
        texts = (paragraph for document in part for paragraph in document.decode().split("\n\n"))
        return {" ".join(text.split()) for text in texts if len(" ".join(text.split())) >= 40}

    assert not paragraphs(documents.train) & paragraphs(documents.held_out)


def test_known_words_are_counted_without_a_cut_word():
    vocabulary = {"the", "value", "of"}
    assert demo.known_words(["The value of", "the valu of the tru"], vocabulary) == 5 / 6
    assert demo.known_words([""], vocabulary) == 0


@pytest.mark.parametrize(
    "figures, expected",
    [
        ((1.9, 2.7, 0.9), []),
        ((2.8, 2.7, 0.9), ["beat Witten-Bell"]),
        ((math.nan, 2.7, 0.9), ["beat Witten-Bell"]),
        ((1.9, 2.7, 0.6), ["60% of the generated words"]),
        ((2.8, 2.7, 0.6), ["beat Witten-Bell", "60% of the generated words"]),
    ],
)
def test_broken_promises_are_named(figures, expected):
    messages = demo.failures(*figures)
    assert len(messages) == len(expected)
    assert all(words in message for words, message in zip(expected, messages, strict=True))


def test_a_broken_promise_is_the_exit_status(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "run", lambda plan, output, console: ["the model is bad"])
    assert demo.main(["--output", str(tmp_path)]) == 1
    assert "the model is bad" in capsys.readouterr().out
    monkeypatch.setattr(demo, "run", lambda plan, output, console: [])
    assert demo.main(["--output", str(tmp_path)]) == 0


def test_learning_rate_ends_with_the_time_as_with_the_steps():
    plan = demo.Plan()
    middle = demo.learning_rate(plan, plan.steps // 2, 0.0)
    assert demo.learning_rate(plan, 0, 0.0) < middle < plan.learning_rate
    last = demo.learning_rate(plan, plan.steps // 2, plan.seconds)
    assert last == demo.learning_rate(plan, plan.steps, 0.0) < 0.1 * plan.learning_rate


def test_quick_demo_runs_from_end_to_end(tmp_path, capsys):
    # optax multiplies Python numbers with integers, as any program outside these tests may.
    with jax.numpy_dtype_promotion("standard"):
        assert demo.main(["--quick", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for words in ("float32", "float16, to nearest", "float16, stochastic", "Witten-Bell", "not checked"):
        assert words in printed
    picture = (tmp_path / "loss_curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    logits = load_checkpoint(tmp_path / "model")(jnp.zeros((1, 4), jnp.int32))
    assert logits.shape == (1, 4, 256) and np.all(np.isfinite(logits))
