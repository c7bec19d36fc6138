"""The whole mixer and the whole language model as plain loops over tokens, in NumPy and float64."""

import numpy as np


def read(parameter):
    """A parameter's values in float64."""
    return np.asarray(parameter[...], np.float64)


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0.0, x)


def rms_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def linear(layer, x):
    out = x @ read(layer.kernel)
    return out if layer.bias is None else out + read(layer.bias)


def gated_norm(x, z, scale, *, num_groups, eps, norm_before_gate):
    """One token, group by group."""
    v = x if norm_before_gate else x * silu(z)
    parts = [part / np.sqrt(np.mean(part * part) + eps) for part in np.split(v, num_groups)]
    out = np.concatenate(parts) * scale
    return out * silu(z) if norm_before_gate else out


def mixer(module, u):
    """out (t, hidden_size) of one sequence u (t, hidden_size)."""
    config = module.config
    projected = linear(module.in_proj, u)
    cuts = [config.inner_size, config.inner_size + config.conv_size]
    z, xbc, dt = np.split(projected, cuts, axis=-1)
    weight, decay = read(module.conv_weight), -np.exp(read(module.A_log))
    bias = 0.0 if module.conv_bias is None else read(module.conv_bias)
    state = np.zeros((config.num_heads, config.headdim, config.dstate))
    heads_per_group = config.num_heads // config.num_groups
    out = []
    for t in range(len(u)):
        mixed = np.zeros(config.conv_size) + bias
        for back in range(config.conv_width):
            if t - back >= 0:
                mixed += weight[config.conv_width - 1 - back] * xbc[t - back]
        mixed = silu(mixed)
        x = mixed[: config.inner_size].reshape(config.num_heads, config.headdim)
        b, c = mixed[config.inner_size :].reshape(2, config.num_groups, config.dstate)
        step = np.clip(softplus(dt[t] + read(module.dt_bias)), *config.time_step_limit)
        y = np.empty_like(x)
        for head in range(config.num_heads):
            group = head // heads_per_group
            state[head] *= np.exp(step[head] * decay[head])
            state[head] += step[head] * np.outer(x[head], b[group])
            y[head] = state[head] @ c[group] + read(module.D)[head] * x[head]
        out.append(
            gated_norm(
                y.reshape(-1),
                z[t],
                read(module.norm_scale),
                num_groups=config.gate_groups,
                eps=config.norm_eps,
                norm_before_gate=config.norm_before_gate,
            )
        )
    return linear(module.out_proj, np.array(out))


def language_model(model, tokens):
    """Logits (t, vocab) of one sequence of tokens (t,)."""
    eps = model.config.norm_eps
    u = read(model.embedding.embedding)[tokens]
    for block in model.blocks:
        u = u + mixer(block.mixer, rms_norm(u, read(block.norm.scale), eps))
    head = read(model.embedding.embedding).T if model.head is None else read(model.head.kernel)
    return rms_norm(u, read(model.norm.scale), eps) @ head
