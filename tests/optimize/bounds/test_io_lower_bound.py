"""The least bytes that a step moves beside its matrix products, counted by hand.

The activations of the networks all have one size and are much larger than all other values.
"""

from __future__ import annotations

import pytest

from mbc.optimize import effort
from mbc.optimize.bounds.io_lower_bound import fewest_bytes
from tests.graphs import training_graph

ELEMENTS = 4 * 4 * 64 * 64
PASS = 4 * ELEMENTS  # bytes that one pass over an activation moves
SIGNS = ELEMENTS // 8
SMALL = 12_000  # more than filters, statistics and control block take in any of these


def fewest(body: str) -> int:
    source = f"""
    network net(batch = 4) {{
      input image[batch, 4, 64, 64] : float
      input target[batch, 4, 64, 64] : float
      {body}
      output y
      loss (y, target) |> mse
    }}
    """
    return fewest_bytes(training_graph(source))


LOSS = 3 * PASS  # reads y and the target, writes the gradient of y for the last convolution


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # Nothing but the loss: what convolutions move is theirs.
        ("y = image |> conv(4, 3, pad=1) |> conv(4, 3, pad=1)", LOSS),
        # Forward 2; backward reads dz and a sign, writes dy; the sign is written beside z.
        ("y = image |> conv(4, 3, pad=1) |> relu |> conv(4, 3, pad=1)", LOSS + 4 * PASS + 2 * SIGNS),
        # An activation whose gradient needs its input whole costs a pass for it.
        ("y = image |> conv(4, 3, pad=1) |> gelu |> conv(4, 3, pad=1)", LOSS + 5 * PASS),
        # A chain of them costs what one does.
        ("y = image |> conv(4, 3, pad=1) |> gelu |> tanh |> silu |> conv(4, 3, pad=1)", LOSS + 5 * PASS),
        # Batch norm: 3 passes forward, 5 backward. The sign comes from y, which both backward sweeps read anyway.
        ("y = image |> conv(4, 3, pad=1) |> bn |> relu |> conv(4, 3, pad=1)", LOSS + 8 * PASS),
    ],
)
def test_chains(body: str, expected: int):
    assert 0 <= fewest(body) - expected < SMALL


def test_a_residual_block():
    plain = fewest("x = image |> conv(4, 3, pad=1)\n y = x |> conv(4, 3, pad=1) |> bn |> relu |> conv(4, 3, pad=1)")
    block = fewest(
        "x = image |> conv(4, 3, pad=1)\n"
        "s = x |> conv(4, 3, pad=1) |> bn\n"
        "z = s + x |> relu\n"
        "y = z |> conv(4, 3, pad=1)"
    )
    # Forward reads the shortcut too: 1. The gradient of the sum is masked by a sign, which the convolution's input no
    # longer tells: it is written once and read by three sweeps, the last of which reads the gradient of the sum and
    # that of the convolution and writes that of the shortcut: 3.
    assert abs(block - plain - 4 * PASS - 4 * SIGNS) < SMALL


def test_values_recomputed_from_afar_are_read_instead(monkeypatch: pytest.MonkeyPatch):
    body = "y = image |> conv(4, 3, pad=1) |> bn |> relu |> conv(4, 3, pad=1)"
    exact = fewest(body)
    monkeypatch.setattr(effort, "IO_BOUND_REACH", -1000)
    assert fewest(body) > exact


def test_precision_halves_activations():
    source = "network n(batch = 8) { input x[batch, 4, 64, 64] : float input t[batch, 4, 64, 64] : float\n"
    source += "y = x |> conv(4, 3, pad=1) |> bn |> relu |> conv(4, 3, pad=1) output y loss (y, t) |> mse }"
    sizes: list[int] = []
    for precision in ("fp32", "bf16"):
        sizes.append(fewest_bytes(training_graph(source, ("train.precision", precision))))
    # Both inputs come in fp32 and the image is cast: 6 bytes an element more.
    assert sizes[1] < 0.7 * sizes[0]


def test_a_chain_of_shortcuts():
    # A block more: statistics read its result (1), the sum reads it and the shortcut and is written with its sign (3).
    # Backward a sweep reads both gradients of the sum, the sign and the result, and writes the masked gradient (4); the
    # next reads it and the result, and writes the convolution's (3).
    block = "x = (x |> conv(4, 3, pad=1) |> bn) + x |> relu\n"
    bodies = (f"x = image |> conv(4, 3, pad=1)\n{block * count}y = x |> conv(4, 3, pad=1)" for count in (12, 6))
    deep, shallow = map(fewest, bodies)
    assert abs((deep - shallow) / 6 - 11 * PASS - 2 * SIGNS) < SMALL
