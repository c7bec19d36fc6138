"""Other libraries' decode updates on the same rows: each gives a list of calls to time, or raises where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.update_rows import Row

Sets = list[dict[str, torch.Tensor]]


def expanded(row: Row, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What both peers take: parameters and dt as views without memory of their own along headdim and dstate."""
    heads, p, n = row.heads, row.headdim, row.dstate
    return dict(
        x=arrays["x"][:, 0],
        dt=arrays["dt"][:, 0, :, None].expand(row.batch, heads, p),
        A=arrays["A"][:, None, None].expand(heads, p, n),
        B=arrays["B"][:, 0],
        C=arrays["C"][:, 0],
        D=arrays["D"].to(arrays["dt"].dtype)[:, None].expand(heads, p),
        dt_bias=arrays["dt_bias"].to(arrays["dt"].dtype)[:, None].expand(heads, p),
    )


def flashinfer(row: Row, sets: Sets, algorithm: str = "auto") -> list[Callable[[], Any]]:
    """FlashInfer's update; with rounding, its bits are the contract's only in the algorithm "simple"."""
    from flashinfer.mamba import selective_state_update

    calls = []
    for arrays in sets:
        given = expanded(row, arrays)
        options: dict[str, Any] = dict(state_batch_indices=arrays["read_slots"], dt_softplus=row.softplus)
        options["out"] = torch.empty_like(given["x"]).contiguous()
        if row.rounds is not None:
            options |= dict(rand_seed=torch.tensor([7], device="cuda"), philox_rounds=row.rounds)
        state = arrays["state"]

        def call(given: Any = given, options: Any = options, state: torch.Tensor = state) -> None:
            selective_state_update(state, **given, **options, algorithm=algorithm)

        calls.append(call)
    return calls


def mamba_ssm(row: Row, sets: Sets) -> list[Callable[[], Any]]:
    """mamba_ssm's Triton update, which cannot round stochastically."""
    if row.rounds is not None:
        raise NotImplementedError("mamba_ssm has no stochastic rounding")
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    calls = []
    for arrays in sets:
        given = expanded(row, arrays)

        def call(given: Any = given, arrays: Any = arrays) -> None:
            selective_state_update(
                arrays["state"], **given, dt_softplus=row.softplus, state_batch_indices=arrays["read_slots"]
            )

        calls.append(call)
    return calls


PEERS: dict[str, Callable[[Row, Sets], list[Callable[[], Any]]]] = {"flashinfer": flashinfer, "mamba_ssm": mamba_ssm}
