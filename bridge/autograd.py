"""The autograd node of a call: saves what the compiled backward pass needs, where torch checks its version."""

from __future__ import annotations

import inspect
from itertools import compress
from operator import not_
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from bridge.constants import import_values
from bridge.dlpack import conform
from bridge.invocation import Call
from bridge.program import Program, ProgramCache

NO_VMAP = "torch_call cannot be mapped by torch.func.vmap: apply jax.vmap inside the JAX function instead"

NO_SECOND = "torch_call has no second derivatives: take the first one with jax.grad inside the JAX function"

# Made here and not where it is used, which may be inside a torch.func transform that would make it its own.
_GUARD = torch.empty(0, requires_grad=True)

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


def transforms_active() -> bool:
    """Whether torch.func or forward-mode differentiation is on, which only an autograd node sees or can refuse."""
    if _functorch.peek_interpreter_stack() is None:
        return forward_ad._current_level >= 0
    kinds = [interpreter.key() for interpreter in _functorch.get_interpreter_stack() or ()]
    if kinds.count(_functorch.TransformType.Grad) > 1:  # the outer one would see a gradient of zero
        raise NotImplementedError(NO_SECOND)
    return True


class Pullback(torch.autograd.Function):
    """The backward program, as a node that refuses to be differentiated; it also sees real tensors under torch.func.

    `guard` requires gradients: without it, a second derivative that no residual leads to would be zero in silence.
    """

    @staticmethod
    def forward(program: Program, others: list[Any], guard: torch.Tensor | None, count: int, *tensors: Any) -> Any:
        where = program.where
        where.check()
        saved, cotangents = iter(tensors[:count]), tensors[count:]

        def ready(tensor: torch.Tensor, name: str) -> torch.Tensor:
            return conform(tensor, lambda: name, where.device, program.x64)

        # Hooks on saved tensors may give back others than were saved.
        residuals = [ready(next(saved), "saved tensor") if other is None else other for other in others]
        given = [None if one is None else ready(one.contiguous(), "gradient") for one in cotangents]
        order = where.enter()
        arrays = import_values([*residuals, *given], where, order, borrowed=True)
        gradients = program.backward(arrays[: len(residuals)], arrays[len(residuals) :])
        return tuple([where.give(gradient, order) for gradient in gradients])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise NotImplementedError(NO_SECOND)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:
        raise NotImplementedError(NO_VMAP)


class Node(torch.autograd.Function):
    """Forward and backward programs around one call. Residuals are further outputs, so that torch owns them."""

    @staticmethod
    def forward(
        call: Call, cache: ProgramCache, wanted: tuple[int, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        call.replace(tensors)
        call.tracked = any(tensor.requires_grad for tensor in tensors)
        return tuple(call.run(wanted, cache))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
        call, _, wanted, *_ = inputs
        program, count = call.program, len(call.program.results)
        ctx.set_materialize_grads(False)
        if not wanted:
            ctx.mark_non_differentiable(*output)
            return
        ctx.program, ctx.wanted, ctx.total, ctx.tracked = program, wanted, len(inputs), call.tracked
        integers = compress(output, map(not_, program.differentiable))
        ctx.mark_non_differentiable(*integers, *output[count:])
        saved = [call.saved(kind, index, output) for kind, index in program.saved]
        ctx.others = [None if isinstance(one, torch.Tensor) else one for one in saved]
        ctx.save_for_backward(*[one for one in saved if isinstance(one, torch.Tensor)])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradients: list[torch.Tensor | None] = [None] * ctx.total
        floats = list(compress(cotangents, ctx.program.differentiable))
        if any(one is not None for one in floats):
            saved = ctx.saved_tensors
            run, guard = Pullback.forward, None
            if torch.is_grad_enabled():
                run, guard = Pullback.apply, _GUARD if ctx.tracked else None
            found = run(ctx.program, ctx.others, guard, len(saved), *saved, *floats)
            for place, gradient in zip(ctx.wanted, found, strict=True):
                gradients[place + 3] = gradient
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            "torch_call has no forward-mode derivative: apply jax.jvp inside the JAX function instead of torch.func.jvp"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:
        raise NotImplementedError(NO_VMAP)


# `apply` looks up the signature of `forward` at every call, which costs as much as the rest of it.
Node.forward.__signature__ = inspect.signature(Node.forward)
