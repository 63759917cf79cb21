"""Least squares with non-negative coefficients (Lawson and Hanson's active set)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def nnls(a: Array, y: Array) -> Array:
    """The x >= 0 that minimises ``|a @ x - y|``; a is (equations, coefficients).

    Works on the normal equations, so columns should be scaled to comparable size and the problem kept regular (a few
    rows of ridge); a singular step falls back to the least-norm solution.
    """
    gram, moment = a.T @ a, a.T @ y
    n = len(moment)
    x = np.zeros(n)
    passive = np.zeros(n, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(moment).max(initial=0.0)))
    for _ in range(30 * n):
        gradient = moment - gram @ x
        gradient[passive] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        passive[best] = True
        while True:
            index = np.flatnonzero(passive)
            z = np.linalg.lstsq(gram[np.ix_(index, index)], moment[index], rcond=None)[0]
            if z.min() > 0:
                x[:] = 0.0
                x[index] = z
                break
            low = z <= 0
            now = x[index]
            step = float(np.min(now[low] / np.maximum(now[low] - z[low], 1e-300)))
            x[index] = now + step * (z - now)
            passive[index[x[index] <= 1e-14]] = False
            x[~passive] = 0.0
            if not passive.any():
                break
    return x
