"""The GPU on which tests measure, if there is one and the toolchain can build for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mbc.codegen.toolchain import find_toolchain
from mbc.errors import MbcError
from mbc.measure.gpu import Gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    missing = find_toolchain().missing
    if missing:
        pytest.skip("needs " + "; ".join(map(str, missing)))
    try:
        device = Gpu(memory_share=0.1)  # of the free memory: processes of a parallel run share the GPU
    except MbcError as error:
        pytest.skip(error.message)
    with device:
        yield device
