"""Bad input: the right kind of error, and a message that names the argument. Nothing is silently accepted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import ReplayCache, StochasticRounding
from tests.calls import CALLS, F, G, H, N, P, T, W, batched, packed, prefill, replay, update

FORMS = [(op, form) for op, forms in CALLS.items() for form in forms]
over_forms = pytest.mark.parametrize(("op", "form"), FORMS)

NAMES = {
    (op, form): [name for name, value in CALLS[op][form]().items() if isinstance(value, np.ndarray)]
    for op, form in FORMS
}
EVERY_ARGUMENT = [(op, form, name) for (op, form), names in NAMES.items() for name in names]
over_arguments = pytest.mark.parametrize(("op", "form", "name"), EVERY_ARGUMENT)


def refuse(op, arguments, error, *words):
    """The call, and `explain` of the call, raise `error` with all of `words` in the message."""
    for function in (getattr(jax_ssd, op), functools.partial(jax_ssd.explain, op)):
        with pytest.raises(error) as caught:
            function(**arguments)
        for word in words:
            assert word in str(caught.value), str(caught.value)


def names_argument(op, arguments, error, name, **changes):
    """Refused with a message that begins with the changed argument, as `name:` or as `cache.state:` for a cache."""
    changed = arguments | changes
    for function in (getattr(jax_ssd, op), functools.partial(jax_ssd.explain, op)):
        with pytest.raises(error) as caught:
            function(**changed)
        message = str(caught.value)
        assert message.split(":")[0].split(" ")[0] == name, message
        assert "expected" in message and "got" in message, message


def accept(op, arguments):
    """The call passes validation; it is traced, not run."""
    jax.eval_shape(lambda: getattr(jax_ssd, op)(**arguments))


@over_forms
def test_the_good_call_is_good(op, form):
    """What the other tests spoil works, so that they fail for the reason they name."""
    for verdict in jax_ssd.explain(op, **CALLS[op][form]())[:1]:
        assert verdict.reason is None
    getattr(jax_ssd, op)(**CALLS[op][form]())


@over_arguments
def test_one_axis_more(op, form, name):
    """An extra axis; x's own rank chooses the form, so x may be refused through another argument's name."""
    arguments = CALLS[op][form]()
    wrong = arguments[name][None]
    if name == "x":
        refuse(op, arguments | {name: wrong}, ValueError, "expected", "got")
    elif name == "D" or (name == "write_slots" and form == "several"):
        names_argument(op, arguments, ValueError, name, **{name: wrong[None]})
    else:
        names_argument(op, arguments, ValueError, name, **{name: wrong})


@over_arguments
def test_an_axis_of_another_size(op, form, name):
    """Every axis in turn, one longer than it should be; x comes first, so what disagrees with it is named instead."""
    arguments = CALLS[op][form]()
    for axis in range(arguments[name].ndim):
        wrong = np.repeat(arguments[name], 2, axis=axis)
        if name == "x" or (name in ("cu_seqlens", "checkpoint_positions", "cache", "state", "B") and axis == 0):
            if name in ("cache", "state") or (op, name) == ("chunk_scan", "checkpoint_positions"):
                continue  # the numbers of slots and of checkpoints are free
            refuse(op, arguments | {name: wrong}, ValueError, "expected", "got")
        elif name == "B":
            refuse(op, arguments | {name: wrong}, ValueError, "expected", "got")
        else:
            names_argument(op, arguments, ValueError, name, **{name: wrong})


@over_arguments
def test_wrong_dtype(op, form, name):
    """Integers for floats and floats for integers."""
    arguments = CALLS[op][form]()
    given = arguments[name]
    wrong = given.astype(np.int32) if given.dtype in (F, bool) else given.astype(F)
    names_argument(op, arguments, ValueError, name, **{name: wrong})
    names_argument(op, arguments, ValueError, name, **{name: given.astype(np.complex64)})


@over_arguments
def test_wrong_kind(op, form, name):
    """Lists, strings and objects are not arrays."""
    arguments = CALLS[op][form]()
    for wrong in (arguments[name].tolist(), "x", object()):
        names_argument(op, arguments, TypeError, name, **{name: wrong})


@over_forms
@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C"])
def test_none_is_not_an_array(op, form, name):
    names_argument(op, CALLS[op][form](), TypeError, name, **{name: None})


@over_forms
@pytest.mark.parametrize("name", ["B", "C", "z"])
def test_tokens_share_a_dtype(op, form, name):
    arguments = CALLS[op][form]()
    names_argument(op, arguments, ValueError, name, **{name: arguments[name].astype(np.float16)})


@over_forms
def test_dt_is_as_wide_as_x_or_float32(op, form):
    arguments = CALLS[op][form]()
    names_argument(op, arguments, ValueError, "dt", dt=arguments["dt"].astype(np.float16))


@over_forms
@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "float8_e4m3fn"])
def test_x_of_an_unsupported_dtype(op, form, dtype):
    arguments = CALLS[op][form]()
    names_argument(op, arguments, ValueError, "x", x=arguments["x"].astype(jnp.dtype(dtype)))


@over_forms
def test_a_positive_A_is_refused_where_it_is_known(op, form):
    arguments = CALLS[op][form]()
    for wrong in (0.5, np.nan):
        names_argument(op, arguments, ValueError, "A", A=np.array([-1, -1, wrong, -1], F))
    accept(op, arguments | {"A": np.zeros(H, F)})


@over_forms
@pytest.mark.parametrize("limit", [(-0.1, 1.0), (1.0, 0.5), (np.nan, 1.0), (0.0, np.nan)])
def test_dt_limit_in_the_wrong_order_or_sign(op, form, limit):
    names_argument(op, CALLS[op][form](), ValueError, "dt_limit", dt_limit=limit)


@over_forms
@pytest.mark.parametrize("limit", [1.0, None, (1.0,), (0.0, 1.0, 2.0), "ab", ("0", None)])
def test_dt_limit_of_the_wrong_kind(op, form, limit):
    with pytest.raises((TypeError, ValueError), match="dt_limit"):
        getattr(jax_ssd, op)(**CALLS[op][form](), dt_limit=limit)


@over_forms
@pytest.mark.parametrize("softplus", [1, "yes", None, np.ones(2)])
def test_dt_softplus_is_a_flag(op, form, softplus):
    names_argument(op, CALLS[op][form](), TypeError, "dt_softplus", dt_softplus=softplus)


@over_forms
def test_groups_divide_heads(op, form):
    arguments = CALLS[op][form]()
    three = {name: np.repeat(arguments[name], 3, axis=-2)[..., :3, :] for name in ("B", "C")}
    refuse(op, arguments | three, ValueError, "B", "groups", "3")


@over_forms
@pytest.mark.parametrize(("size", "axis"), [("headdim", -1), ("num_heads", -2), ("dstate", None), ("num_groups", None)])
def test_a_size_of_zero_has_no_state(op, form, size, axis):
    """P, N, H or G of 0 is a clear error, in the call's own shapes."""
    arguments = CALLS[op][form]()
    cut = lambda value, axis: np.take(value, [], axis=axis)  # noqa: E731
    if axis is not None:
        arguments |= {name: cut(arguments[name], axis) for name in ("x", "z")}
        if size == "num_heads":
            arguments |= {name: cut(arguments[name], -1) for name in ("dt", "A", "D", "dt_bias")}
            arguments |= {name: cut(arguments[name], -2) for name in ("B", "C")}
    else:
        axis = -1 if size == "dstate" else -2
        arguments |= {name: cut(arguments[name], axis) for name in ("B", "C")}
    state_axis = {"headdim": 2, "num_heads": 1, "dstate": 3}.get(size)
    for name in ("initial_states", "cache", "state"):
        if isinstance(arguments.get(name), np.ndarray) and state_axis is not None:
            arguments[name] = cut(arguments[name], state_axis)
    refuse(op, arguments, ValueError, "0")


@pytest.mark.parametrize("op", ["chunk_scan", "prefill"])
@pytest.mark.parametrize("chunk_size", [0, -1])
def test_chunk_size_is_positive(op, chunk_size):
    names_argument(op, CALLS[op]["packed"](), ValueError, "chunk_size", chunk_size=chunk_size)


@pytest.mark.parametrize("op", ["chunk_scan", "prefill"])
@pytest.mark.parametrize("chunk_size", [1.5, "64", True, np.ones(3)])
def test_chunk_size_is_an_integer(op, chunk_size):
    names_argument(op, CALLS[op]["packed"](), TypeError, "chunk_size", chunk_size=chunk_size)


@pytest.mark.parametrize("op", ["chunk_scan", "prefill"])
@pytest.mark.parametrize("bounds", [[1, 4, 4, 9], [0, 5, 4, 9], [0, 4, 4, 11], [-1, 4, 4, 9], [0, 4, 9, 4]])
def test_cu_seqlens_that_the_host_knows(op, bounds):
    names_argument(op, CALLS[op]["packed"](), ValueError, "cu_seqlens", cu_seqlens=np.array(bounds, np.int32))


@pytest.mark.parametrize("op", ["chunk_scan", "prefill"])
def test_cu_seqlens_is_not_empty(op):
    names_argument(op, CALLS[op]["packed"](), ValueError, "cu_seqlens", cu_seqlens=np.zeros(0, np.int32))


@pytest.mark.parametrize("op", ["chunk_scan", "prefill"])
def test_64_bit_integers_are_taken_or_refused_never_wrapped(op):
    arguments = CALLS[op]["packed"]()
    wide = arguments | {"cu_seqlens": arguments["cu_seqlens"].astype(np.int64)}
    narrow, same = getattr(jax_ssd, op)(**arguments), getattr(jax_ssd, op)(**wide)
    np.testing.assert_array_equal(narrow.y, same.y)
    bounds = np.array([0, 4, 4, 2**31 + 1], np.int64)
    names_argument(op, arguments, ValueError, "cu_seqlens", cu_seqlens=bounds)


def test_forms_do_not_mix():
    """Each argument that belongs to one form is refused in the other, by name."""
    cu_seqlens = packed()["cu_seqlens"]
    refuse("chunk_scan", batched() | {"cu_seqlens": cu_seqlens}, ValueError, "cu_seqlens")
    refuse(
        "chunk_scan", batched() | {"checkpoint_positions": np.zeros(1, np.int32)}, ValueError, "checkpoint_positions"
    )
    refuse("chunk_scan", packed() | {"seq_idx": np.zeros((1, T), np.int32)}, ValueError, "seq_idx")
    refuse("chunk_scan", packed() | {"seq_idx": np.zeros(T, np.int32)}, ValueError, "seq_idx")
    without = {name: value for name, value in packed().items() if name != "cu_seqlens"}
    refuse("chunk_scan", without, ValueError, "cu_seqlens")


@pytest.mark.parametrize("state_dtype", [np.int32, jnp.dtype("float8_e4m3fn")])
def test_state_dtype_of_another_kind(state_dtype):
    names_argument("chunk_scan", batched(), ValueError, "state_dtype", state_dtype=state_dtype)


def test_state_dtype_is_a_dtype():
    names_argument("chunk_scan", batched(), TypeError, "state_dtype", state_dtype="no such dtype")


SLOT_ARGUMENTS = [
    ("prefill", "packed", "slots"),
    ("prefill", "packed", "checkpoint_slots"),
    ("selective_state_update", "one", "read_slots"),
    ("selective_state_update", "one", "write_slots"),
    ("replay_update", "one", "slots"),
]


@pytest.mark.parametrize(("op", "form", "name"), SLOT_ARGUMENTS)
def test_slots_out_of_range(op, form, name):
    """Known on the host: refused. On a device: padding."""
    arguments = CALLS[op][form]()
    slots = arguments[name].copy()
    slots[0] = W
    names_argument(op, arguments, ValueError, name, **{name: slots})
    accept(op, arguments | {name: jnp.asarray(slots)})


@pytest.mark.parametrize(("op", "form", "name"), SLOT_ARGUMENTS)
def test_slots_written_twice(op, form, name):
    """Two rows that write one slot are refused where the host can see it; negative slots may repeat."""
    arguments = CALLS[op][form]()
    if name == "read_slots":
        del arguments["write_slots"]
    refuse(op, arguments | {name: np.full_like(arguments[name], 1)}, ValueError, name.split("_")[-1])
    accept(op, arguments | {name: np.full_like(arguments[name], -1)})


def test_a_slot_written_by_one_row_and_read_by_another():
    arguments = update() | {"write_slots": np.array([3, 0, 5], np.int32)}
    refuse("selective_state_update", arguments, ValueError, "write_slots", "0")
    own = update() | {"write_slots": np.array([0, 1, 2], np.int32)}
    accept("selective_state_update", own)


def test_a_checkpoint_over_a_slot_in_use():
    arguments = prefill() | {"checkpoint_slots": np.array([3, 1], np.int32)}
    refuse("prefill", arguments, ValueError, "checkpoint_slots")


def test_rows_beyond_the_pool():
    arguments = {name: value for name, value in update().items() if not name.endswith("slots")}
    arguments["state"] = arguments["state"][:2]
    refuse("selective_state_update", arguments, ValueError, "read_slots")
    arguments = replay() | {
        "cache": ReplayCache.from_state(jnp.zeros((2, H, P, N)), ring_size=4, num_groups=G, dtype=F)
    }
    refuse("replay_update", arguments | {"slots": None}, ValueError, "slots")


def test_checkpoints_come_in_pairs():
    for missing in ("checkpoint_slots", "checkpoint_positions"):
        refuse("prefill", prefill() | {missing: None}, ValueError, "checkpoint")


@pytest.mark.parametrize(
    ("op", "form", "pool"), [("prefill", "packed", "cache"), ("selective_state_update", "one", "state")]
)
def test_rounding_needs_a_narrow_state(op, form, pool):
    rounding = StochasticRounding(jnp.zeros((1, 2), jnp.uint32))
    arguments = CALLS[op][form]()
    names_argument(op, arguments, ValueError, "rounding", rounding=rounding)
    accept(op, arguments | {pool: arguments[pool].astype(np.float16), "rounding": rounding})
    with jax.enable_x64(True):
        wide = {
            name: value.astype(np.float64) if value.dtype == F else value
            for name, value in arguments.items()
            if isinstance(value, np.ndarray)
        }
        names_argument(op, wide, ValueError, "rounding", rounding=rounding)


def test_rounding_a_replay_needs_a_narrow_state():
    rounding = StochasticRounding(jnp.zeros((1, 2), jnp.uint32))
    names_argument("replay_update", replay(), ValueError, "rounding", rounding=rounding)


@pytest.mark.parametrize("op", ["prefill", "selective_state_update", "replay_update"])
def test_rounding_of_the_wrong_kind(op):
    form = next(iter(CALLS[op]))
    for wrong in (7, np.zeros((1, 2), np.uint32), "seeds"):
        names_argument(op, CALLS[op][form](), TypeError, "rounding", rounding=wrong)


def test_float64_states_belong_to_float64_tokens():
    with jax.enable_x64(True):
        refuse("selective_state_update", update() | {"state": np.zeros((W, H, P, N))}, ValueError, "state", "float64")
        refuse("chunk_scan", batched() | {"state_dtype": np.float64}, ValueError, "state_dtype", "float64")


def test_replay_calls_fit_half_a_ring():
    arguments = replay(True)
    small = ReplayCache.from_state(jnp.zeros((W, H, P, N)), ring_size=3, num_groups=G, dtype=F)
    refuse("replay_update", arguments | {"cache": small}, ValueError, "ring", "2")


def test_replay_cache_of_the_wrong_kind():
    names_argument("replay_update", replay(), TypeError, "cache", cache=np.zeros((W, H, P, N), F))
    for function in (jax_ssd.rewind, jax_ssd.materialize, jax_ssd.reset):
        with pytest.raises(TypeError, match="cache"):
            function(np.zeros((W, H, P, N), F), *[np.zeros(1, np.int32)] * (2 if function is jax_ssd.rewind else 1))


def test_replay_cache_of_another_dtype():
    half = ReplayCache.from_state(jnp.zeros((W, H, P, N)), ring_size=4, num_groups=G, dtype=np.float16)
    refuse("replay_update", replay() | {"cache": half}, ValueError, "cache.x", "float16")


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("state", np.zeros((W, H, P), F), ValueError),
        ("state", np.zeros((W, H, P, N), np.int32), ValueError),
        ("state", [[1.0]], TypeError),
        ("ring_size", 0, ValueError),
        ("ring_size", 1.5, TypeError),
        ("num_groups", 3, ValueError),
        ("num_groups", 0, ValueError),
        ("dtype", np.int32, ValueError),
        ("dtype", "nothing", TypeError),
    ],
)
def test_making_a_replay_cache(name, wrong, error):
    arguments = {"state": np.zeros((W, H, P, N), F), "ring_size": 4, "num_groups": G, "dtype": F} | {name: wrong}
    with pytest.raises(error, match="groups" if name == "num_groups" else name):
        ReplayCache.from_state(**arguments)


@pytest.mark.parametrize(
    ("slots", "accepted", "error", "name"),
    [
        (np.array([[0]], np.int32), np.array([1], np.int32), ValueError, "slots"),
        (np.array([0.0], F), np.array([1], np.int32), ValueError, "slots"),
        ([0], np.array([1], np.int32), TypeError, "slots"),
        (np.array([W], np.int32), np.array([1], np.int32), ValueError, "slots"),
        (np.array([0, 1], np.int32), np.array([1], np.int32), ValueError, "accepted"),
        (np.array([0], np.int32), np.array([-1], np.int32), ValueError, "accepted"),
        (np.array([0], np.int32), np.array([1.0], F), ValueError, "accepted"),
        (np.array([0], np.int32), 1, TypeError, "accepted"),
    ],
)
def test_rewind_arguments(slots, accepted, error, name):
    with pytest.raises(error, match=f"^{name}"):
        jax_ssd.rewind(replay()["cache"], slots, accepted)


def test_materialize_and_reset_arguments():
    cache = replay()["cache"]
    for wrong, error in ((np.ones(H, F), ValueError), (-np.ones(3, F), ValueError), ([-1.0] * H, TypeError)):
        with pytest.raises(error, match=r"^A"):
            jax_ssd.materialize(cache, wrong)
    for wrong, error in ((np.array([W], np.int32), ValueError), (np.zeros(1, F), ValueError), ([0], TypeError)):
        with pytest.raises(error, match=r"^slots"):
            jax_ssd.materialize(cache, -np.ones(H, F), slots=wrong)
        with pytest.raises(error, match=r"^slots"):
            jax_ssd.reset(cache, wrong)


@over_forms
def test_implementations_by_name(op, form):
    arguments = CALLS[op][form]()
    function = getattr(jax_ssd, op)
    with pytest.raises(ValueError, match=r"implementation.*fastest"):
        function(**arguments, implementation="fastest")
    with pytest.raises(ValueError, match="implementation"):
        function(**arguments, implementation=())
    for wrong in (3, ("xla", 3)):
        with pytest.raises(TypeError, match="implementation"):
            function(**arguments, implementation=wrong)


@over_forms
def test_a_named_implementation_never_falls_back(op, form):
    """Every implementation that has a reason against the call raises it when named, alone or with others like it."""
    arguments = CALLS[op][form]()
    against = {v.name: v.reason for v in jax_ssd.explain(op, **arguments) if v.reason is not None}
    for name, reason in against.items():
        with pytest.raises(NotImplementedError) as caught:
            getattr(jax_ssd, op)(**arguments, implementation=name)
        assert reason in str(caught.value) and name in str(caught.value)
    if against:
        with pytest.raises(NotImplementedError) as caught:
            getattr(jax_ssd, op)(**arguments, implementation=tuple(against))
        assert all(reason in str(caught.value) for reason in against.values())
        accept(op, arguments | {"implementation": (*against, "xla")})


def test_explain_arguments():
    with pytest.raises(ValueError, match=r"op.*chunk_scam"):
        jax_ssd.explain("chunk_scam")
    with pytest.raises(TypeError, match="no_such_option"):
        jax_ssd.explain("chunk_scan", **batched(), no_such_option=1)
    with pytest.raises(TypeError, match="device"):
        jax_ssd.explain("chunk_scan", **batched(), device="gpu")


def test_nothing_happens_before_validation_is_over():
    """A donated state survives a refused call."""
    state = jnp.ones((W, H, P, N))
    arguments = update() | {"state": state, "z": np.zeros((1,), F)}
    with pytest.raises(ValueError, match="z"):
        jax.jit(lambda state: jax_ssd.selective_state_update(**arguments | {"state": state}), donate_argnums=0)(state)
    np.testing.assert_array_equal(state, np.ones((W, H, P, N)))
