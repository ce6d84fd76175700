"""The error function in float64, vectorised. NumPy has none, and SciPy would be a dependency of every package.

Rational approximations of FreeBSD's msun (s_erf.c, Sun Microsystems 1993), within 1 unit in the last place.
"""

from __future__ import annotations

import numpy as np

from mbc.ops.base import Array

_ERX = 8.45062911510467529297e-01
_PP = (
    1.28379167095512558561e-01,
    -3.25042107247001499370e-01,
    -2.84817495755985104766e-02,
    -5.77027029648944159157e-03,
    -2.37630166566501626084e-05,
)
_QQ = (
    1.0,
    3.97917223959155352819e-01,
    6.50222499887672944485e-02,
    5.08130628187576562776e-03,
    1.32494738004321644526e-04,
    -3.96022827877536812320e-06,
)
_PA = (
    -2.36211856075265944077e-03,
    4.14856118683748331666e-01,
    -3.72207876035701323847e-01,
    3.18346619901161753674e-01,
    -1.10894694282396677476e-01,
    3.54783043256182359371e-02,
    -2.16637559486879084300e-03,
)
_QA = (
    1.0,
    1.06420880400844228286e-01,
    5.40397917702171048937e-01,
    7.18286544141962662868e-02,
    1.26171219808761642112e-01,
    1.36370839120290507362e-02,
    1.19844998467991074170e-02,
)
_RA = (
    -9.86494403484714822705e-03,
    -6.93858572707181764372e-01,
    -1.05586262253232909814e01,
    -6.23753324503260060396e01,
    -1.62396669462573470355e02,
    -1.84605092906711035994e02,
    -8.12874355063065934246e01,
    -9.81432934416914548592e00,
)
_SA = (
    1.0,
    1.96512716674392571292e01,
    1.37657754143519042600e02,
    4.34565877475229228821e02,
    6.45387271733267880336e02,
    4.29008140027567833386e02,
    1.08635005541779435134e02,
    6.57024977031928170135e00,
    -6.04244152148580987438e-02,
)
_RB = (
    -9.86494292470009928597e-03,
    -7.99283237680523006574e-01,
    -1.77579549177547519889e01,
    -1.60636384855821916062e02,
    -6.37566443368389627722e02,
    -1.02509513161107724954e03,
    -4.83519191608651397019e02,
)
_SB = (
    1.0,
    3.03380607434824582924e01,
    3.25792512996573918826e02,
    1.53672958608443695994e03,
    3.19985821950859553908e03,
    2.55305040643316442583e03,
    4.74528541206955367215e02,
    -2.24409524465858183362e01,
)


def erf(x: Array) -> Array:
    """Return 2 / sqrt(pi) times the integral of exp(-t * t) from 0 to x, element by element, in float64."""
    x = np.asarray(x, np.float64)
    size = np.abs(x)
    out = np.copysign(1.0, x)
    out[np.isnan(x)] = np.nan

    near = size < 0.84375
    t = x[near]
    z = t * t
    out[near] = t + t * (_polynomial(_PP, z) / _polynomial(_QQ, z))

    middle = (size >= 0.84375) & (size < 1.25)
    t = size[middle] - 1
    out[middle] = np.copysign(_ERX + _polynomial(_PA, t) / _polynomial(_QA, t), x[middle])

    for tail, top, bottom in (
        ((size >= 1.25) & (size < 1 / 0.35), _RA, _SA),
        ((size >= 1 / 0.35) & (size < 6), _RB, _SB),
    ):
        t = size[tail]
        z = 1 / (t * t)
        rest = np.exp(-t * t - 0.5625 + _polynomial(top, z) / _polynomial(bottom, z)) / t
        out[tail] = np.copysign(1 - rest, x[tail])
    return out


def _polynomial(coefficients: tuple[float, ...], z: Array) -> Array:
    total = np.full_like(z, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * z + c
    return total
