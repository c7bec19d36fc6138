"""bridge.jax_call: torch functions inside eager JAX programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridge import jax_call  # noqa: E402
from bridge.reverse import to_torch  # noqa: E402
from bridge.streams import endpoint  # noqa: E402


def close(result, expected):
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def layer(x, w, i, scale, *, name):
    return {"y": torch.tanh(x @ w) * scale, "i": i + 1, "name": name, "none": None}


def arguments():
    x, w = jax.random.normal(jax.random.key(0), (4, 3)), jax.random.normal(jax.random.key(1), (3, 2))
    return x, w, jnp.arange(3)


def test_pytrees_in_and_out():
    x, w, i = arguments()
    result = jax_call(layer, x, w, i, 0.5, name="name")
    assert isinstance(result["y"], jax.Array) and result["name"] == "name" and result["none"] is None
    close(result["y"], jnp.tanh(x @ w) * 0.5)
    assert result["i"].dtype == jnp.int32 and result["i"].tolist() == [1, 2, 3]


def test_gradients_equal_those_of_jax():
    x, w, i = arguments()

    def through_torch(x, w):
        return jnp.sum(jax_call(layer, x, w, i, 0.5, name="")["y"] ** 2)

    def plain(x, w):
        return jnp.sum((jnp.tanh(x @ w) * 0.5) ** 2)

    for found, expected in zip(jax.grad(through_torch, (0, 1))(x, w), jax.grad(plain, (0, 1))(x, w), strict=True):
        close(found, expected)


def test_a_pullback_can_be_used_again_and_unused_results_are_zero():
    x = jnp.array([0.5, 1.0])
    (sine, cosine), pull = jax.vjp(lambda x: jax_call(lambda x: (torch.sin(x), torch.cos(x)), x), x)
    zero = jnp.zeros_like(x)
    for scale in (1.0, 2.0):
        close(pull((jnp.full(2, scale), zero))[0], scale * cosine)
        close(pull((zero, jnp.full(2, scale)))[0], -scale * sine)


def test_complex_gradients_follow_jaxs_convention():
    z = jnp.array([1 + 2j, 3 - 1j])

    def loss(square):
        return lambda z: jnp.sum(jnp.real(square(z)))

    found = jax.grad(loss(lambda z: jax_call(lambda z: z * z * (1 + 2j) + z.conj(), z)))(z)
    close(found, jax.grad(loss(lambda z: z * z * (1 + 2j) + jnp.conj(z)))(z))


def test_an_argument_without_influence_and_a_frozen_result():
    x, w = jnp.ones(2), jnp.ones(3)
    close(jax.grad(lambda w: jnp.sum(jax_call(lambda x, w: x * 2, x, w)))(w), jnp.zeros(3))
    close(jax.grad(lambda x: jnp.sum(jax_call(lambda x: x.detach() * 2, x)))(x), jnp.zeros(2))


def test_memory_is_shared_where_nobody_can_write_to_it_later():
    x = jnp.arange(100.0)
    (tensor,) = to_torch([x], endpoint(torch.device("cpu")))
    assert tensor.data_ptr() == x.unsafe_buffer_pointer()
    kept = torch.nn.Parameter(torch.ones(100))
    results = jax_call(lambda x: (kept, x, x[:10]), x)
    with torch.no_grad():
        kept.fill_(5.0)
    close(results[0], np.ones(100))
    assert results[1].unsafe_buffer_pointer() != x.unsafe_buffer_pointer()


def test_a_python_number_is_differentiated():
    close(jax.grad(lambda x: jax_call(torch.sin, x))(1.0), np.cos(1.0))


@pytest.mark.parametrize(
    "transformed",
    [
        lambda x: jax.jit(lambda x: jax_call(torch.sin, x))(x),
        lambda x: jax.vmap(lambda x: jax_call(torch.sin, x))(x),
        lambda x: jax.grad(lambda x: jax.grad(lambda x: jnp.sum(jax_call(torch.sin, x)))(x).sum())(x),
    ],
    ids=["jit", "vmap", "second grad"],
)
def test_traced_arrays_are_refused(transformed):
    with pytest.raises(TypeError, match="eager JAX only"):
        transformed(jnp.ones(3))


def test_refusals():
    x = jnp.ones(3)
    with pytest.raises(TypeError, match="fn: expected a function"):
        jax_call(3, x)
    with pytest.raises(ValueError, match="wrote to one of them"):
        jax_call(lambda x: x.add_(1), x)
    with pytest.raises(ValueError, match=r"result: .*float64"):
        jax_call(lambda x: x.double(), x)
    with pytest.raises(TypeError, match=r"result: .*sparse"):
        jax_call(lambda x: torch.ones(2, 2).to_sparse(), x)


def test_arrays_on_several_devices_are_refused():
    if jax.device_count() < 2:
        pytest.skip("JAX has one device")
    elsewhere = jax.device_put(jnp.ones(2), jax.devices()[1])
    with pytest.raises(ValueError, match="one device"):
        jax_call(torch.add, jnp.ones(2), elsewhere)
