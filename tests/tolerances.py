"""How far from the float64 oracle a result may be: one table, by dtype and by what is compared.

An error is ||result - oracle|| / ||oracle||, the oracle having read the same rounded inputs.
"""

import numpy as np

# Decay that a chunk's cumulative sum may add up to before its differences have lost a float32 digit.
STEEP = 100.0

_STEEP_FLOAT32 = 1e-4

_TABLE = {
    # Values and states: sums of a few hundred terms, no cancellation, eps 2.2e-16. Gradients: the project's promise.
    ("float64", "value"): 1e-11,
    ("float64", "state"): 1e-11,
    ("float64", "gradient"): 1e-9,
    # Products and sums in float32 (eps 1.2e-7) over chunks of up to 256 tokens.
    ("float32", "value"): 1e-5,
    ("float32", "state"): 1e-5,
    ("float32", "gradient"): 1e-5,
    # Rounding the result to 8 bits alone costs 2^-9 / sqrt(3) = 1.1e-3 to 1.65e-3; a factor of 2 for rounded operands.
    ("bfloat16", "value"): 3e-3,
    ("bfloat16", "state"): 3e-3,
    ("bfloat16", "gradient"): 3e-3,
    # Rounding to 11 bits costs 1.4e-4 to 2.1e-4.
    ("float16", "value"): 5e-4,
    ("float16", "state"): 5e-4,
    ("float16", "gradient"): 5e-4,
}


def tolerance(dtype, kind, *, decay=0.0):
    """The bound for `kind` ("value", "state" or "gradient"); `decay` is the largest sum of |A dt| in a chunk."""
    name = np.dtype(dtype).name
    if name == "float32" and decay > STEEP:
        return _STEEP_FLOAT32
    return _TABLE[name, kind]


def error(result, oracle):
    """||result - oracle|| / ||oracle||, in float64; where the oracle is 0, the result has to be 0 as well."""
    result, oracle = np.asarray(result).astype(np.float64), np.asarray(oracle, np.float64)
    assert result.shape == oracle.shape, (result.shape, oracle.shape)
    distance, size = np.linalg.norm(result - oracle), np.linalg.norm(oracle)
    return distance / size if size else (0.0 if distance == 0.0 else np.inf)


def check(result, oracle, dtype, kind, *, decay=0.0, name=""):
    """Fail, with the figures, where `result` is not within the table's bound of `oracle`."""
    found, bound = error(result, oracle), tolerance(dtype, kind, decay=decay)
    assert found <= bound, f"{name or kind} ({np.dtype(dtype).name}): error {found:.3e}, bound {bound:.1e}"


# Half a unit in the last place, relative: what rounding to nearest may change.
HALF_ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
