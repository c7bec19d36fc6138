"""Gradients through bridge.torch_call: torch.autograd's rules, what is saved, and torch.func."""

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from bridge import torch_call, wrap  # noqa: E402
from tests.bridge_harness import close, gradients, seed  # noqa: E402, F401


def test_gradients_equal_torch_autograd():
    x, w = torch.randn(5, 3), torch.randn(3, 4)
    found = gradients(lambda x, w: torch_call(lambda x, w: jnp.tanh(x @ w) * jnp.exp(-w).sum(), x, w), x, w)
    for gradient, expected in zip(
        found, gradients(lambda x, w: torch.tanh(x @ w) * torch.exp(-w).sum(), x, w), strict=True
    ):
        close(gradient, expected)


def test_complex_gradients_follow_torchs_convention():
    z, w = torch.randn(2, 4, dtype=torch.complex64)
    found = gradients(lambda z, w: torch_call(lambda z, w: z * z * w + jnp.conj(w), z, w), z, w)
    for gradient, expected in zip(found, gradients(lambda z, w: z * z * w + w.conj(), z, w), strict=True):
        close(gradient, expected)


def test_one_tensor_used_twice():
    x = torch.randn(3)
    (gradient,) = gradients(lambda x: torch_call(lambda a, b: a * b * b, x, x), x)
    close(gradient, 3 * x**2)


def test_only_tensors_that_require_gradients_get_them():
    x, w = torch.randn(3, requires_grad=True), torch.randn(3)
    torch_call(jnp.multiply, x, w).sum().backward()
    close(x.grad, w)
    assert w.grad is None
    frozen = torch_call(jnp.multiply, x.detach(), w)
    assert not frozen.requires_grad


def test_integer_arguments_and_results():
    x, i = torch.randn(4, requires_grad=True), torch.tensor([2, 0, 2], dtype=torch.int32)
    picked, largest = torch_call(lambda x, i: (x[i], jnp.argmax(x)), x, i)
    assert picked.requires_grad and not largest.requires_grad and largest.dtype == torch.int32
    picked.sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 2.0, 0.0]


def test_results_that_are_not_used():
    function = wrap(lambda x: (x * 2, jnp.sin(x), x.sum()))
    for used in ((0,), (1,), (2,), (0, 2)):
        x = torch.randn(3, requires_grad=True)
        results = function(x)
        torch.stack([results[i].sum() for i in used]).sum().backward()
        expected = (torch.full((3,), 2.0), x.detach().cos(), torch.ones(3))
        close(x.grad, sum(expected[i] for i in used))


def test_an_argument_that_has_no_influence_gets_zeros():
    x, w = torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)
    torch_call(lambda x, w: x * 2, x, w).sum().backward()
    assert w.grad.tolist() == [0.0, 0.0]


def test_no_grad_and_inference_mode():
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert not torch_call(jnp.sin, x).requires_grad
    with torch.inference_mode():
        y = torch_call(jnp.sin, x)
    assert not y.requires_grad
    close(y, x.detach().sin())


def test_expanded_cotangents_and_retained_graphs():
    x = torch.randn(3, 2, requires_grad=True)
    loss = torch_call(jnp.sin, x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    close(x.grad, 2 * x.detach().cos())
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_second_derivative_is_refused():
    x = torch.randn(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(torch_call(jnp.sin, x).sum(), x, create_graph=True)
    close(gradient.detach(), x.detach().cos())
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.sum().backward()


def test_overwriting_a_needed_argument_is_noticed():
    x = torch.randn(3, requires_grad=True)
    y = torch_call(lambda x: x * x, x)
    with torch.no_grad():
        x.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_overwriting_a_result_that_the_backward_pass_needs_is_noticed():
    x = torch.randn(3, requires_grad=True)
    y = torch_call(jnp.exp, x)
    y.detach().fill_(torch.nan)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_overwriting_what_is_not_needed_does_no_harm():
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    y, z = torch_call(lambda x, w: (x + w, jnp.tanh(w) * 2), x, w)
    x.fill_(torch.nan)
    z.detach().fill_(torch.nan)
    (y.sum() + z.sum()).backward()
    close(w.grad, 1 + 2 * (1 - w.detach().tanh() ** 2))


def test_overwriting_the_argument_of_a_contiguous_copy_does_no_harm():
    base = torch.randn(4, 6)
    x, w = base[:, ::2], torch.randn(4, 3, requires_grad=True)
    expected = x.clone()
    y = torch_call(jnp.multiply, x, w)
    base.fill_(torch.nan)
    y.sum().backward()
    close(w.grad, expected)


def test_saved_tensor_hooks_and_checkpointing():
    x = torch.randn(4, 4, requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.t().clone(), lambda t: t.t()):
        y = torch_call(lambda x: jnp.sin(x) * jnp.cos(x), x)
    assert packed
    y.sum().backward()
    close(x.grad, (2 * x.detach()).cos())
    x.grad = None
    torch.utils.checkpoint.checkpoint(lambda x: torch_call(jnp.sin, x), x, use_reentrant=False).sum().backward()
    close(x.grad, x.detach().cos())


def test_float64_gradients_outlive_the_context_that_allowed_them():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with jax.enable_x64(True):
        y = torch_call(jnp.sin, x)
    y.sum().backward()
    assert x.grad.dtype == torch.float64
    close(x.grad, x.detach().cos())


def test_random_keys_among_the_residuals():
    @jax.checkpoint
    def dropped(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x), 0.0)

    x = torch.randn(64, requires_grad=True)
    y = torch_call(lambda x: dropped(x, jax.random.key(0) if x.ndim else None), x)
    y.sum().backward()
    close(x.grad, torch.where(y.detach() != 0, x.detach().cos(), 0.0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on entering forward mode
def test_torch_func():
    x = torch.randn(3)
    gradient = torch.func.grad(lambda x: torch_call(jnp.sin, x).sum())
    close(gradient(x), x.cos())
    assert not gradient(x).requires_grad
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.func.grad(lambda x: gradient(x).sum())(x)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient(x.clone().requires_grad_()).sum().backward()
    with pytest.raises(NotImplementedError, match=r"jax\.vmap"):
        torch.func.vmap(lambda x: torch_call(jnp.sin, x))(x)
    with pytest.raises(NotImplementedError, match=r"jax\.jvp"):
        torch.func.jvp(lambda x: torch_call(jnp.sin, x), (x,), (x,))
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=r"jax\.jvp"),
    ):
        torch_call(jnp.sin, torch.autograd.forward_ad.make_dual(x, x))


def test_vmap_over_a_gradient_is_refused():
    x = torch.randn(2, 3)
    with pytest.raises(NotImplementedError, match=r"jax\.vmap"):
        torch.func.vmap(torch.func.grad(lambda x: torch_call(jnp.sin, x).sum()))(x)
