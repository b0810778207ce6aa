"""Exponentials and logarithms with the same bits on every machine.

Ranks plan from the same exchanged times, and each must arrive at the same plan. The last bit of
`math.exp` and `math.log` depends on the C library and the processor, that of numpy's on the
processor. So these use only operations that IEEE 754 rounds exactly: + - * / and powers of 2.
"""

from __future__ import annotations

import math

import numpy as np

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
# Taylor coefficients of exp(r) for |r| <= ln(2) / 2, and of atanh(s) / s in s^2 for |s| <= 0.172.
# The following terms are below 1e-10: speeds are not known as well by far.
_EXP = [1 / math.factorial(n) for n in range(10)]
_ATANH = [1 / (2 * n + 1) for n in range(6)]


def exp(values: np.ndarray) -> np.ndarray:
    """Return the exponentials of finite values up to 700; the relative error is below 1e-10."""
    powers = np.rint(values / _LN2)
    return np.ldexp(_polynomial(_EXP, values - powers * _LN2), powers.astype(np.int64))


def log(values: np.ndarray) -> np.ndarray:
    """Return the natural logarithms of positive, finite values; the error is below 1e-10."""
    fractions, powers = np.frexp(values)
    is_small = fractions < _SQRT_HALF
    fractions = np.where(is_small, 2 * fractions, fractions)
    powers = powers - is_small
    s = (fractions - 1) / (fractions + 1)
    return powers * _LN2 + 2 * s * _polynomial(_ATANH, s * s)


def _polynomial(coefficients: list[float], x: np.ndarray) -> np.ndarray:
    total = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total *= x
        total += coefficient
    return total
