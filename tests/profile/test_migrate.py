"""Profiles of earlier schema versions: read through the table of renamed names, and brought up to date by a writer."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from mbc import aliases
from mbc.errors import MbcError
from mbc.ir.graph import Operation
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda import KERNELS
from mbc.ops.base import NoAttributes
from mbc.ops.fused import join
from mbc.ops.normalization import BatchNormalize
from mbc.profile.edit import write_profile
from mbc.profile.kernel_versions import current
from mbc.profile.model import Extent, Measurement, Profile
from mbc.profile.read_profile import read_profile
from mbc.profile.schema import SCHEMA_VERSION
from mbc.profile.signature import signature
from mbc.profile.writer import ProfileWriter
from tests.profile.profiles import IDENTITY, measurement, profile, request

BEFORE = 4  # the last version with former names
IMAGE, MASK = TensorType((8, 16, 4, 4), DType.FP32), TensorType((8, 2, 4, 4), DType.UINT8)
VECTOR = TensorType((16,), DType.FP32)


def own(name: str, operands: int) -> Measurement:
    last = (Layout.CHANNELS_LAST,) * operands
    return Measurement("mbc", name, KERNELS[name].settings, last, 0, 5.0, 0.1, True, False, (), 1e-7)


def fused() -> Request:
    """relu's gradient by a bit mask, and the reductions over it."""
    group = join(
        [
            Operation("relu", "relu_backward_masked", ("dy", "mask"), ("d",), NoAttributes(), None),
            Operation(
                "bn", "batch_normalize_backward_reduce", ("x", "d", "mean", "var"), ("dgamma", "dbeta"),
                BatchNormalize(1e-5), None,
            ),
        ],
        ("d", "dgamma", "dbeta"),
    )  # fmt: skip
    inputs, outputs = (IMAGE, MASK, IMAGE, VECTOR, VECTOR), (IMAGE, VECTOR, VECTOR)
    return Request(group.kind, group.attributes, inputs, outputs, Precision.FP32)


def today() -> Profile:
    """An operation that was renamed, one whose kernel has a version, a group, and two of libraries."""
    mask = Request("relu_mask", NoAttributes(), (IMAGE,), (MASK,), Precision.FP32)
    statistics = Request("batch_statistics", NoAttributes(), (IMAGE,), (VECTOR, VECTOR), Precision.FP32)
    filters = request(kind="convolution_backward_filter")
    matmul = Measurement(
        "cublaslt", filters.kind, (("algorithm", 1), ("split_k", 16)), (Layout.CHANNELS_LAST,) * 3, 4096, 7.0, 0.1,
        True, True, (), 1e-7,
    )  # fmt: skip
    found = {
        mask: [own("relu_mask", 2)],
        statistics: [own("batch_statistics", 3)],
        fused(): [own("relu_backward_masked_bn_reduce", 8)],
        filters: [matmul],
        request(): [measurement(3, 9.0)],
    }
    extents = {r: Extent(64, "", "2026-11-21T10:00:00", r is filters) for r in found}
    return profile(found, extents)


def reverse(table: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in table.items()}


def as_before(path: Path) -> Path:
    """The profile in a file of the last version with former names."""
    kinds, kernels = reverse(aliases.KINDS), reverse(aliases.KERNELS)

    def old_signature(text: str) -> str:
        for new, old in kinds.items():
            for start, end in (('"', '"'), ('"', "+"), ("+", "+"), ("+", '"')):
                text = text.replace(f"{start}{new}{end}", f"{start}{old}{end}")
        return text

    def old_settings(provider: str, text: str) -> str:
        names = reverse(aliases.SETTINGS.get(provider, {}))
        return json.dumps([[names.get(name, name), value] for name, value in json.loads(text)], separators=(",", ":"))

    write_profile(today(), path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.create_function("old_signature", 1, old_signature)
        connection.create_function("old_kernel", 1, lambda name: kernels.get(name, name))
        connection.create_function("old_settings", 2, old_settings)
        connection.execute("UPDATE request SET signature = old_signature(signature)")
        connection.execute("UPDATE candidate SET name = old_kernel(name), settings = old_settings(provider, settings)")
        connection.execute("ALTER TABLE request RENAME COLUMN micro_batches_only TO for_parts")
        for table in ("collectives", "collective_slowdowns"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute(f"PRAGMA user_version = {BEFORE}")
    return path


def content(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return "\n".join(connection.iterdump())


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0]


def test_the_file_has_former_names(tmp_path: Path):
    text = content(as_before(tmp_path / "p.sqlite"))
    for name in ("relu_signs", "relu_backward_signs+batch_normalize_sums", "relu_backward_signs_sums", "for_parts"):
        assert name in text
    assert '["edition",' in text and '["sums",16]' in text and "masked" not in text and "split_k" not in text


@pytest.mark.parametrize("packed", [False, True])
def test_an_earlier_file_says_what_today_s_says(tmp_path: Path, packed: bool):
    path = as_before(tmp_path / "p.sqlite")
    if packed:
        path = tmp_path / "p.sqlite.gz"
        path.write_bytes(gzip.compress((tmp_path / "p.sqlite").read_bytes()))
    bytes_before = path.read_bytes()
    found = read_profile(path)
    assert found == current(today()) and not found.earlier
    assert found.candidates(fused())[0].name == "relu_backward_masked_bn_reduce"
    assert path.read_bytes() == bytes_before  # reading changes nothing


def test_a_writer_brings_it_up_to_date(tmp_path: Path):
    path = as_before(tmp_path / "p.sqlite")
    with ProfileWriter(path, IDENTITY) as writer:
        assert signature(fused()) in writer.known()
    assert version(path) == SCHEMA_VERSION and read_profile(path) == current(today())
    now = content(path)
    write_profile(today(), path)
    assert sorted(content(path).splitlines()) == sorted(now.splitlines())


def test_a_file_that_cannot_be_brought_up_to_date_stays_as_it_is(tmp_path: Path):
    path = as_before(tmp_path / "p.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE candidate SET settings = 'none' WHERE provider = 'cudnn'")
    before = content(path)
    with pytest.raises(MbcError) as caught:
        ProfileWriter(path, IDENTITY)
    assert caught.value.code == "MBC073"
    assert content(path) == before and version(path) == BEFORE
