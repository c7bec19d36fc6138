"""The algebra of sequences: packing, splitting, checkpoints and documents change nothing that they should not."""

import dataclasses

import jax
import numpy as np
import pytest

import jax_ssd
from jax_ssd import reference
from tests.cases import BY_NAME
from tests.harness import (
    BFLOAT16,
    FLOAT32,
    gradients,
    oracle,
    oracle_gradients,
    over_implementations,
    random_cotangents,
    require,
    same_bits,
    scan,
)
from tests.tolerances import check

TOKEN_ARRAYS = ("x", "dt", "B", "C", "z")


def tokens(arguments, rows, **changes):
    """`arguments` with only these rows of every token array, and other arrays exchanged."""
    return {
        name: value[rows] if name in TOKEN_ARRAYS and value is not None else value for name, value in arguments.items()
    } | changes


def cut(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


@pytest.fixture(params=[FLOAT32, BFLOAT16], ids=lambda dtype: dtype.name)
def packed(request):
    """Arguments of a packed call whose fixed shape fits several packings; 60 tokens, 4 sequences."""
    case = dataclasses.replace(
        BY_NAME["packed"], seqlens=(7, 0, 13, 30), padding=10, checkpoints=(3, 19, 20, 49), chunk_size=8
    )
    return case.arrays(request.param) | case.options()


@over_implementations
def test_result_does_not_depend_on_the_neighbours(implementation, packed):
    """Sequence 2 keeps every bit, value and gradient, whatever is packed before and after it; shapes are equal."""
    arguments = packed | {"implementation": implementation}
    require(implementation, "chunk_scan", **arguments)
    cotangents = random_cotangents(jax_ssd.chunk_scan, 1, **arguments)
    rows = slice(7, 20)
    draw = np.random.default_rng(0)
    changed = dict(arguments)
    for name in TOKEN_ARRAYS:
        noise = draw.uniform(0.5, 2.0, arguments[name].shape).astype(arguments[name].dtype)
        changed[name] = noise
        changed[name][rows] = arguments[name][rows]
    changed["initial_states"] = arguments["initial_states"] * 2.0
    changed["initial_states"][2] = arguments["initial_states"][2]
    noisy = jax.tree.map(lambda leaf: leaf * np.asarray(3.0, leaf.dtype), cotangents)
    noisy.y[rows], noisy.final_states[2] = cotangents.y[rows], cotangents.final_states[2]
    noisy.checkpoint_states[1] = cotangents.checkpoint_states[1]

    results = [gradients(jax_ssd.chunk_scan, cotangents, **arguments), gradients(jax_ssd.chunk_scan, noisy, **changed)]
    own = [
        (
            result.y[rows],
            result.final_states[2],
            result.checkpoint_states[1],
            slopes["initial_states"][2],
            [slopes[name][rows] for name in TOKEN_ARRAYS],
        )
        for result, slopes in results
    ]
    assert same_bits(*own)


@over_implementations
@pytest.mark.parametrize("lengths", [(13, 7, 0, 30), (30, 1, 13, 6), (0, 0, 13, 0), (13, 13, 13, 13)])
def test_result_does_not_depend_on_the_place(implementation, packed, lengths):
    """The sequence of 13 tokens moved elsewhere in the pack, with other neighbours, keeps its bits."""
    require(implementation, "chunk_scan", **packed)
    here = scan(implementation, **packed)
    place, bounds = lengths.index(13), cut(lengths)
    rows, own = slice(bounds[place], bounds[place + 1]), slice(7, 20)
    moved = {name: np.full_like(packed[name], np.nan) for name in TOKEN_ARRAYS}
    draw = np.random.default_rng(0)
    for name, array in moved.items():
        array[: bounds[-1]] = draw.uniform(0.1, 1.0, array[: bounds[-1]].shape)
        array[rows] = packed[name][own]
    states = np.roll(packed["initial_states"], place - 2, axis=0)
    there = scan(implementation, **packed | moved | {"cu_seqlens": bounds, "initial_states": states})
    assert same_bits((here.y[own], here.final_states[2]), (there.y[rows], there.final_states[place]))


@over_implementations
def test_batch_rows_are_alone(implementation):
    """A row of a batch has the same bits beside other rows and in another place."""
    case = dataclasses.replace(BY_NAME["everything"], batch=3)
    arguments = case.arrays(FLOAT32) | case.options()
    order = np.array([2, 0, 1])
    shuffled = tokens(arguments, order, initial_states=arguments["initial_states"][order])
    shuffled["x"][1] *= 3.0
    first, second = scan(implementation, **arguments), scan(implementation, **shuffled)
    for old, new in ((2, 0), (1, 2)):
        assert same_bits((first.y[old], first.final_states[old]), (second.y[new], second.final_states[new]))


@over_implementations
def test_packed_is_batched(implementation):
    case = BY_NAME["everything"]
    arguments = case.arrays(FLOAT32) | case.options()
    expected = scan(implementation, **arguments)
    flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in arguments.items() if name in TOKEN_ARRAYS}
    result = scan(implementation, **arguments | flat, cu_seqlens=cut([45, 45]))
    check(result.y.reshape(expected.y.shape), expected.y, FLOAT32, "value")
    check(result.final_states, expected.final_states, FLOAT32, "state")


@over_implementations
@pytest.mark.parametrize("first", [0, 1, 16, 29, 45])
def test_split_is_whole(implementation, first):
    """Two calls, the state carried over, are one call: values, final state and every gradient."""
    case = dataclasses.replace(BY_NAME["everything"], batch=1)
    arguments = case.arrays(FLOAT32) | case.options()
    require(implementation, "chunk_scan", **arguments)

    def halves(*, implementation, initial_states, **whole):
        parts = [
            {name: value[:, rows] if name in TOKEN_ARRAYS else value for name, value in whole.items()}
            for rows in (slice(None, first), slice(first, None))
        ]
        head = jax_ssd.chunk_scan(**parts[0], initial_states=initial_states, implementation=implementation)
        tail = jax_ssd.chunk_scan(**parts[1], initial_states=head.final_states, implementation=implementation)
        return jax_ssd.ScanResult(jax.numpy.concatenate([head.y, tail.y], axis=1), tail.final_states, None)

    cotangents = random_cotangents(jax_ssd.chunk_scan, 2, **arguments)
    result, found = gradients(halves, cotangents, implementation=implementation, **arguments)
    expected, slopes = oracle_gradients(reference.chunk_scan, cotangents, **arguments)
    check(result.y, expected.y, FLOAT32, "value")
    check(result.final_states, expected.final_states, FLOAT32, "state")
    for name, slope in found.items():
        check(slope, slopes[name], FLOAT32, "gradient", name=f"gradient of {name}")


@over_implementations
def test_checkpoints_are_scans_of_prefixes(implementation):
    """A checkpoint after any token is the final state of a scan that ends there."""
    case = dataclasses.replace(BY_NAME["packed"], checkpoints=tuple(range(-2, 62)))
    arguments = case.arrays(FLOAT32) | case.options()
    result = scan(implementation, **arguments)
    end = sum(case.seqlens)
    ends = cut(case.seqlens)
    assert not np.asarray(result.checkpoint_states)[:2].any()
    assert not np.asarray(result.checkpoint_states)[2 + end :].any()
    for position in (0, 3, 6, 7, 8, 14, 15, 19, 20, 33, 48, 49):
        sequence = int(np.searchsorted(ends[1:], position, side="right"))
        rows = slice(ends[sequence], position + 1)
        prefix = tokens(
            arguments,
            rows,
            cu_seqlens=cut([position + 1 - ends[sequence]]),
            initial_states=arguments["initial_states"][sequence : sequence + 1],
            checkpoint_positions=None,
        )
        expected = oracle(reference.chunk_scan, **prefix).final_states[0]
        check(result.checkpoint_states[position + 2], expected, FLOAT32, "state", name=f"position {position}")


@over_implementations
def test_checkpoint_of_a_last_token_is_the_final_state(implementation):
    case = dataclasses.replace(BY_NAME["packed"], checkpoints=(6, 19, 49))
    result = scan(implementation, **case.arrays(FLOAT32) | case.options())
    check(result.checkpoint_states, result.final_states[np.array([0, 2, 3])], FLOAT32, "state")


@over_implementations
def test_documents_are_sequences(implementation):
    """seq_idx restarts where it changes, whatever the numbers are, and initial states belong to the first document."""
    case = dataclasses.replace(BY_NAME["documents"], batch=1, documents=((1, 19, 25),))
    arguments = case.arrays(FLOAT32) | case.options()
    for numbers in ((0, 1, 2), (5, 3, 5), (-1, 0, -1)):
        seq_idx = np.repeat(np.array(numbers, np.int32), (1, 19, 25))[None]
        result = scan(implementation, **arguments | {"seq_idx": seq_idx})
        states = np.concatenate([arguments["initial_states"], np.zeros_like(arguments["initial_states"])[[0, 0]]])
        packed = tokens(arguments, 0, seq_idx=None, initial_states=states, cu_seqlens=cut((1, 19, 25)))
        expected = oracle(reference.chunk_scan, **packed)
        check(result.y[0], expected.y, FLOAT32, "value")
        check(result.final_states[0], expected.final_states[2], FLOAT32, "state")


@over_implementations
def test_documents_do_not_leak(implementation):
    """An earlier document changes no bit of a later one, however large it is, nor gets a gradient from it."""
    case = dataclasses.replace(BY_NAME["documents"], batch=1, documents=((1, 19, 25),))
    arguments = case.arrays(FLOAT32) | case.options() | {"implementation": implementation}
    require(implementation, "chunk_scan", **arguments)
    cotangents = random_cotangents(jax_ssd.chunk_scan, 1, **arguments)
    cotangents.y[:, :20] = 0.0
    changed = {name: value.copy() if hasattr(value, "copy") else value for name, value in arguments.items()}
    for name in TOKEN_ARRAYS:
        changed[name][:, :20] *= 1e4 if name != "dt" else 1.5
    changed["initial_states"] *= 1e6
    outcomes = [gradients(jax_ssd.chunk_scan, cotangents, **given) for given in (arguments, changed)]
    later = [
        (result.y[:, 20:], result.final_states, [slopes[name][:, 20:] for name in TOKEN_ARRAYS])
        for result, slopes in outcomes
    ]
    assert same_bits(*later)
    for _, slopes in outcomes:
        assert not np.asarray(slopes["initial_states"]).any()
        for name in TOKEN_ARRAYS:
            assert not np.asarray(slopes[name][:, :20]).any(), name
