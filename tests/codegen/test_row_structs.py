"""Rows of integers are written in Python and read by a C++ struct: both name equal fields in one order."""

from __future__ import annotations

import re

import pytest

from mbc.kernels import cublaslt, cudnn_convolution, cudnn_legacy
from mbc.resources import folder


@pytest.mark.parametrize(
    ("file", "struct", "fields"),
    [
        ("convolution.cpp", "ConvolutionRow", cudnn_convolution.ROW_FIELDS),
        ("legacy_convolution.cpp", "LegacyRow", cudnn_legacy.ROW_FIELDS),
        ("cublaslt.cpp", "MatmulRow", cublaslt.ROW_FIELDS),
    ],
)
def test_fields_agree(file: str, struct: str, fields: tuple[str, ...]) -> None:
    text = (folder("templates") / "host" / file).read_text(encoding="utf-8")
    body = re.search(rf"struct {struct} \{{(.*?)\}};", text, re.S)
    assert body is not None
    assert tuple(re.findall(r"int64_t (\w+);", body.group(1))) == fields
