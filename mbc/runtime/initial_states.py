"""Values of states before the first step.

Every state has a generator of its own, whose key is the seed and the state's name. The values depend on nothing else:
two plans of a network start with equal values, and so do the old layers of a network that gets another layer.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.graph import Initializer
from mbc.ir.types import TensorType
from mbc.runtime.formats import canonical_dtype

Array = NDArray[Any]


def initial(name: str, kind: TensorType, initializer: Initializer, seed: int) -> Array:
    """Return the canonical array with which state `name` starts.

    `he` and `he_uniform` keep the variance of a ReLU network's activations (He et al. 2015, eq. 10). `xavier` and
    `xavier_uniform` keep that of a linear network in both directions (Glorot and Bengio 2010, eq. 12 and 16).

    Args:
        name: Name of the state, a part of the generator's key.
        kind: Shape and type of the state.
        initializer: Kind of distribution and its parameters.
        seed: Seed of the training, the other part of the key.

    Raises:
        MbcError: MBC140 if the plan names an initializer that does not exist.
    """
    how, fans = initializer.kind, initializer.fan_in + initializer.fan_out
    if how == "constant":
        return np.full(kind.shape, initializer.value, canonical_dtype(kind.dtype))
    deviations = {
        "normal": initializer.value,
        "he": math.sqrt(2 / max(1, initializer.fan_in)),
        "xavier": math.sqrt(2 / max(1, fans)),
    }
    bounds = {
        "uniform": initializer.value,
        "he_uniform": math.sqrt(6 / max(1, initializer.fan_in)),
        "xavier_uniform": math.sqrt(6 / max(1, fans)),
    }
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    if how in deviations:
        array = random.standard_normal(kind.shape) * deviations[how]
    elif how in bounds:
        array = random.uniform(-bounds[how], bounds[how], kind.shape)
    else:
        kinds = ", ".join(["constant", *deviations, *bounds])
        raise MbcError("MBC140", f"state '{name}' has the initializer '{how}', not one of {kinds}", "compile it again")
    return array.astype(canonical_dtype(kind.dtype))
