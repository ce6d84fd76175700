"""The table of renamed names: what it names exists today, and nothing is translated twice."""

from __future__ import annotations

import pytest

from mbc import aliases
from mbc.kernels.cuda import KERNELS
from mbc.ops import KINDS
from mbc.options import TECHNIQUES

TABLES = {
    "kinds": (aliases.KINDS, KINDS),
    "kernels": (aliases.KERNELS, KERNELS),
    "techniques": (aliases.TECHNIQUES, TECHNIQUES),
}


@pytest.mark.parametrize("name", TABLES)
def test_new_names_exist_and_old_ones_do_not(name: str):
    table, known = TABLES[name]
    assert [new for new in table.values() if new not in known] == []
    assert [old for old in table if old in known] == []


@pytest.mark.parametrize(
    "table", [*(table for table, _ in TABLES.values()), aliases.COLUMNS, *aliases.SETTINGS.values()]
)
def test_a_name_is_translated_once_and_to_one_of_its_own(table: dict[str, str]):
    assert len(set(table.values())) == len(table) and table.keys().isdisjoint(table.values())


def test_a_kind_is_translated_by_whole_members():
    assert aliases.kind("relu") == "relu" and aliases.kind("relu_signs_of") == "relu_signs_of"
    assert aliases.kind("join_statistics*+add+relu_signs") == "concat_statistics*+add+relu_mask"


def test_a_signature_is_translated_where_it_says_kinds():
    text = '{"attributes":{"members":[{"kind":"add"},{"kind":"%s"}]},"kind":"add+%s","inputs":["relu_signs"]}'
    old, new = text % (("relu_signs",) * 2), text % (("relu_mask",) * 2)
    assert aliases.signature(old) == new == aliases.signature(new)


def test_settings_are_those_of_a_provider():
    assert aliases.setting("mbc", "edition") == "version" and aliases.setting("cudnn", "edition") == "edition"
