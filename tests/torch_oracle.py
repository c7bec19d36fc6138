"""The scan in PyTorch, token by token in float64, as plain as the formula: what calls from torch are compared with."""

import itertools

import torch
import torch.nn.functional as F


def chunk_scan(x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=None,
               initial_states=None, seq_idx=None, cu_seqlens=None, checkpoint_positions=None):  # fmt: skip
    """(y, final_states, checkpoint_states), all float64 and differentiable; arguments as in `jax_ssd.chunk_scan`."""
    if cu_seqlens is not None:
        return _packed(cu_seqlens.tolist(), checkpoint_positions, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias,
                       dt_softplus=dt_softplus, dt_limit=dt_limit, initial_states=initial_states)  # fmt: skip
    x, dt, A, B, C = (one.double() for one in (x, dt, A, B, C))
    D, z, dt_bias, initial_states = (None if one is None else one.double() for one in (D, z, dt_bias, initial_states))
    batch, num_tokens, num_heads, headdim = x.shape
    B, C = (one.repeat_interleave(num_heads // one.shape[2], 2) for one in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt, threshold=100.0) if dt_softplus else dt
    dt = dt if dt_limit is None else dt.clamp(*dt_limit)
    state = x.new_zeros(batch, num_heads, headdim, B.shape[-1]) if initial_states is None else initial_states
    states, y = [], []
    for t in range(num_tokens):
        if seq_idx is not None and t:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        states.append(state)
        y.append((state * C[:, t, :, None, :]).sum(-1))
    y = torch.stack(y, 1) if y else torch.zeros_like(x)
    y = y if D is None else y + (D if D.ndim == 2 else D[:, None]) * x
    return (y if z is None else y * F.silu(z)), state, states


def _packed(cu_seqlens, positions, x, dt, A, B, C, *, z, initial_states, **options):
    y, finals, states = torch.zeros_like(x, dtype=torch.float64), [], {}
    for i, (start, stop) in enumerate(itertools.pairwise(cu_seqlens)):
        part, final, all_states = chunk_scan(
            *(one[None, start:stop] for one in (x, dt)),
            A,
            *(one[None, start:stop] for one in (B, C)),
            z=None if z is None else z[None, start:stop],
            initial_states=None if initial_states is None else initial_states[i : i + 1],
            **options,
        )
        y = torch.cat([y[:start], part[0], y[stop:]])
        finals.append(final[0])
        states |= {start + t: state[0] for t, state in enumerate(all_states)}
    if positions is None:
        return y, torch.stack(finals), None
    absent = torch.zeros_like(finals[0])
    return y, torch.stack(finals), torch.stack([states.get(int(k), absent) for k in positions])
