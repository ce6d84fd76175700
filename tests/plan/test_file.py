"""Plan files: equal plans give equal bytes, and no invalid file is accepted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbc.errors import MbcError
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.hardware.streams import Space, Stream
from mbc.kernels.providers import PROVIDERS
from mbc.ops import KINDS
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.search.search import Limits, search
from mbc.passes.training_step import differentiate
from mbc.plan.encode import encode_plan
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import SCHEMA_VERSION, Plan
from mbc.plan.schema import content_checksum
from mbc.plan.verify import verify_plan
from mbc.source import Source
from tests.optimize.planned import H200, NETWORKS
from tests.plan.chains import random_plan

PLAN = random_plan(5)
TEXT = dump_plan(PLAN)


def error_of(text: str) -> MbcError:
    with pytest.raises(MbcError) as caught:
        load_plan(text, "net/plan.json")
    assert caught.value.message.startswith("net/plan.json ")
    assert caught.value.remedy
    return caught.value


def refused(text: str, code: str, *words: str) -> None:
    error = error_of(text)
    assert error.code == code, error
    for word in words:
        assert word in error.message, error


def changed(change, seal: bool = True) -> str:
    """Return the file after a change to its content; with `seal`, the checksum is computed again."""
    document = json.loads(TEXT)
    change(document)
    if seal:
        document["checksum"] = content_checksum(document)
    return json.dumps(document)


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(document) -> None:
        for key in path:
            document = document[key]
        document[last] = value

    return change


@pytest.mark.parametrize("seed", range(12))
def test_round_trip(seed):
    plan = random_plan(seed)
    text = dump_plan(plan)
    again = load_plan(text, "plan.json")
    assert again == plan
    assert dump_plan(again) == text
    verify_plan(again)


def test_the_same_bytes_from_another_process():
    """Hash seeds differ between processes, but files must not."""
    code = "import hashlib; from tests.plan.chains import random_plan; from mbc.plan.file import dump_plan\n"
    code += "print(hashlib.sha256(dump_plan(random_plan(5)).encode()).hexdigest())"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1 and digests != {""}


def test_one_row_a_line_and_ascii():
    assert TEXT.isascii() and TEXT.endswith("}\n")
    lines = TEXT.splitlines()
    assert sum(line.startswith('[["l0"]') for line in lines) == sum(
        launch.operations == ("l0",) for launch in PLAN.train.launches
    )


def test_spaces_may_change():
    assert load_plan(json.dumps(json.loads(TEXT), indent=3), "plan.json") == PLAN


def test_spans_keep_their_source():
    value = load_plan(TEXT, "plan.json").graph.values["image"]
    assert value.span is not None and "network chain" in value.span.render()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_attributes_of_every_kind_can_be_saved(kind):
    """Only int, float, bool, str and tuples of these, and of such tuples."""

    def simple(hint: object) -> bool:
        inner = getattr(hint, "__args__", ())
        return all(map(simple, inner)) if inner else hint in (int, float, bool, str, ...)

    for hint in get_type_hints(KINDS[kind].attributes).values():
        assert simple(hint), (kind, hint)


# Whole files


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_cut_short(share):
    refused(TEXT[: int(len(TEXT) * share)], "MBC110", "is cut short")


def test_not_json():
    refused("network x { }", "MBC110", "is not JSON", "line 1, column 1")
    refused(TEXT.replace('"budget_bytes":', '"budget_bytes" '), "MBC110", "is not JSON")


def test_no_numbers_outside_json():
    refused(TEXT.replace('"budget_bytes":1000000000', '"budget_bytes":NaN'), "MBC110", "NaN")


def test_a_field_twice():
    refused(TEXT.replace('"format":', '"format":"x","format":', 1), "MBC110", "'format' is there twice")


def test_nested_without_end():
    refused("[" * 100_000, "MBC110")


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"format":"weights"}'])
def test_no_plan(text):
    refused(text, "MBC111", "is not a plan file")


def test_another_schema_version():
    refused(changed(put("schema", SCHEMA_VERSION + 1), seal=False), "MBC112", f"version {SCHEMA_VERSION + 1}")
    assert "0.1.0" in error_of(changed(put("schema", 99), seal=False)).remedy
    refused(changed(put("schema", SCHEMA_VERSION - 1)), "MBC112", f"reads {SCHEMA_VERSION}")
    for text in (str(SCHEMA_VERSION), None, [SCHEMA_VERSION]):
        refused(changed(put("schema", text)), "MBC112")


def without(table: dict[str, Any], column: str) -> list[Any]:
    """Take a column out of a table, and return its values."""
    place = table["columns"].index(column)
    del table["columns"][place]
    return [row.pop(place) for row in table["rows"]]


def test_a_field_of_a_later_form_may_be_missing():
    plan = replace(
        PLAN,
        host_limit_bytes=None,
        buffers=tuple(replace(b, space=Space.ARENA, alias=None) for b in PLAN.buffers),
        train=replace(PLAN.train, launches=tuple(replace(x, stream=Stream.COMPUTE) for x in PLAN.train.launches)),
        bounds=replace(PLAN.bounds, critical_path_us=0.0),
        predictions=replace(PLAN.predictions, arena_bytes=1 << 40),
    )
    document = json.loads(dump_plan(plan))
    del document["host_limit_bytes"], document["bounds"]["critical_path_us"]
    assert {*without(document["buffers"], "space")} == {"arena"} and {*without(document["buffers"], "alias")} == {None}
    assert {*without(document["train"]["launches"], "stream")} == {"compute"}
    document["checksum"] = content_checksum(document)
    assert load_plan(json.dumps(document), "plan.json") == plan


def test_a_field_of_a_later_form_is_refused_by_name():
    def section(document: dict[str, Any]) -> None:
        document["ranks"] = 8

    def column(document: dict[str, Any]) -> None:
        table = document["train"]["launches"]
        table["columns"].append("rank")
        for row in table["rows"]:
            row.append(0)

    def field(document: dict[str, Any]) -> None:
        document["bounds"]["network_us"] = 1.0

    for change, name in ((section, "ranks"), (column, "rank"), (field, "network_us")):
        refused(changed(change), "MBC114", f"unknown {change.__name__.replace('section', 'field')} '{name}'")
        assert "the version of mbc that wrote it ('0.1.0')" in error_of(changed(change)).remedy


def test_columns_without_a_default_are_needed_and_all_are_in_their_order():
    refused(changed(lambda document: without(document["buffers"], "value")), "MBC114", "expected the columns value,")
    refused(changed(lambda document: document["buffers"]["columns"].reverse()), "MBC114", "expected the columns value,")


def test_the_folder_of_a_source_changes_nothing():
    texts = []
    for folder in ("pa", "pb/deep", "/tmp/elsewhere", "."):
        lowered = lower(parse(Source(f"{folder}/n.mbc", NETWORKS["dense"])), (), None)
        graph = differentiate(lowered.network, lowered.optimizer, lowered.precision)
        draft = search(CandidateTable(graph, H200, PROVIDERS, None, Rules()), Limits(1 << 40))
        texts.append(dump_plan(draft))
    assert len(set(texts)) == 1
    again = load_plan(texts[0], "plan.json")
    assert {op.span.source.name for op in again.graph.train if op.span} == {"n.mbc"}


@given(st.data())
@settings(max_examples=60)
def test_edited(data):
    """Any digit that is replaced by another one is noticed."""
    digits = [i for i, c in enumerate(TEXT) if c.isdigit()]
    at = data.draw(st.sampled_from(digits))
    digit = data.draw(st.sampled_from([c for c in "123456789" if c != TEXT[at]]))
    error = error_of(TEXT[:at] + digit + TEXT[at + 1 :])
    assert error.code in ("MBC110", "MBC112", "MBC113")


def test_edited_message():
    refused(changed(put("buffers", "rows", 3, 8, 512), seal=False), "MBC113", "was changed after it was written")


# Fields: the checksum is right, the content is not


def test_missing_and_unknown_fields():
    refused(changed(lambda d: d.pop("bounds")), "MBC114", "'bounds' is missing")
    refused(changed(put("extra", 1)), "MBC114", "is not a valid plan: unknown field 'extra'")
    refused(changed(lambda d: d["target"].pop("gpu")), "MBC114", "at target", "'gpu' is missing")
    refused(changed(put("graph", "rank", 1)), "MBC114", "at graph", "'rank'")
    refused(changed(put("graph", "train", "rows", 1, 4, "x", 1)), "MBC114", "graph.train.rows[1].attributes")
    refused(changed(put("buffers", "columns", ["value"])), "MBC114", "buffers.columns")


WRONG = [
    (("mbc", 3), "at mbc: expected a text"),
    (("budget_bytes", -1), "at budget_bytes"),
    (("budget_bytes", True), "at budget_bytes: expected a whole number"),
    (("budget_bytes", 1e9), "at budget_bytes"),
    (("target", "memory_bytes", "much"), "at target.memory_bytes"),
    (("predictions", "train_us", -0.5), "at predictions.train_us"),
    (("predictions", "train_low_us", 1e12), "at predictions.train_us: "),
    (("predictions", "infer_high_us", 0.0), "is not between"),
    (("predictions", "overhead_measured", 1), "at predictions.overhead_measured"),
    (("graph", "batch", 0), "at graph.batch"),
    (("graph", "precision", "fp8"), "at graph.precision: 'fp8' is not one of fp32"),
    (("graph", "name", "a b"), "at graph.name: 'a b' is not a name"),
    (("graph", "optimizer", "nesterov", "no"), "at graph.optimizer.nesterov"),
    (("graph", "values", "rows", 0, 0, "x;system"), "at graph.values.rows[0].name"),
    (("graph", "values", "rows", 0, 0, "ｘ"), "is not a name"),
    (("graph", "values", "rows", 1, 0, "image"), "two values 'image'"),
    (("graph", "values", "rows", 0, 1, "fp8"), "graph.values.rows[0].dtype"),
    (("graph", "values", "rows", 0, 2, [0, 2]), "graph.values.rows[0].shape[0]"),
    (("graph", "values", "rows", 0, 3, "guest"), "graph.values.rows[0].role"),
    (("graph", "values", "rows", 0, 4, "yes"), "graph.values.rows[0].per_sample"),
    (("graph", "values", "rows", 0, 5, [0, 1]), "graph.values.rows[0].span: expected 4 items"),
    (("graph", "train", "rows", 2, 0, "l0"), "graph.train.rows[2].name: there are two operations"),
    (("graph", "train", "rows", 1, 4, "sample_shape", [6.5]), "graph.train.rows[1].attributes.sample_shape[0]"),
    (("graph", "train", "rows", 0, 4, []), "graph.train.rows[0].attributes: expected an object"),
    (("graph", "states", "rows", 0, 1, "fan_in", None), "graph.states.rows[0].initializer.fan_in"),
    (("graph", "updates", 0, ["control"]), "graph.updates[0]: expected 2 items"),
    (("buffers", "rows", 0, []), "buffers.rows[0]: expected 9 items"),
    (("buffers", "rows", 0, 1, 7), "buffers.rows[0].start"),
    (("buffers", "rows", 0, 2, 0), "buffers.rows[0].stop"),
    (("buffers", "rows", 0, 3, "nwhc"), "buffers.rows[0].layout"),
    (("buffers", "rows", 0, 4, None), "buffers.rows[0].dtype"),
    (("buffers", "rows", 0, 5, 0), "buffers.rows[0].size_bytes"),
    (("buffers", "rows", 0, 6, "disk"), "buffers.rows[0].space"),
    (("buffers", "rows", 0, 7, -1), "buffers.rows[0].alias"),
    (("buffers", "rows", 0, 8, -256), "buffers.rows[0].offset"),
    (("train", "launches", "rows", 0, 1, ["mbc"]), "train.launches.rows[0].kernel: expected 2 items"),
    (("train", "launches", "rows", 0, 1, 1, 'relu"; x'), "train.launches.rows[0].kernel[1]: 'relu\"; x' is not a name"),
    (("train", "launches", "rows", 0, 1, 1, "relu+"), "train.launches.rows[0].kernel[1]: 'relu+' is not a name"),
    (("train", "launches", "rows", 0, 1, 0, "a+b"), "train.launches.rows[0].kernel[0]: 'a+b' is not a name"),
    (("train", "launches", "rows", 0, 2, [["*/", 1]]), "train.launches.rows[0].settings[0]: '*/' is not a name"),
    (("train", "launches", "rows", 0, 2, [["a", 0.5]]), "train.launches.rows[0].settings[0]"),
    (("train", "launches", "rows", 0, 3, "fast"), "train.launches.rows[0].time_us"),
    (("train", "launches", "rows", 0, 4, 0), "train.launches.rows[0].measured"),
    (("train", "launches", "rows", 0, 5, "third"), "train.launches.rows[0].stream"),
    (("train", "launches", "rows", 0, 6, 1, [0, 0, 1, "x"]), "train.launches.rows[0].accesses[1]: the mode 'x'"),
    (("train", "launches", "rows", 0, 6, 1, [0, 1, 1, "r"]), "train.launches.rows[0].accesses[1]"),
    (("train", "launches", "rows", 0, 6, 1, [0, 0, 1]), "train.launches.rows[0].accesses[1]: expected 4 items"),
]


@pytest.mark.parametrize("path_and_value, message", WRONG, ids=[".".join(map(str, p[:-1])) for p, _ in WRONG])
def test_wrong_values(path_and_value, message):
    refused(changed(put(*path_and_value)), "MBC115", message)


NOWHERE = [
    (("graph", "loss", "losses"), "at graph.loss: there is no value 'losses'"),
    (("graph", "inputs", 0, 3), "graph.inputs[0]: there is no value 3"),
    (("graph", "train", "rows", 1, 1, "convolve"), "graph.train.rows[1].kind: there is no kind of operation"),
    (("graph", "train", "rows", 1, 2, 0, "nobody"), "graph.train.rows[1].inputs[0]: there is no value 'nobody'"),
    (("graph", "values", "rows", 0, 5, [9, 1, 1, 1]), "graph.values.rows[0].span: there is no source 9"),
    (("bounds", "floor_operation", "x"), "at bounds.floor_operation: there is no operation 'x'"),
    (("buffers", "rows", 0, 0, "nobody"), "buffers.rows[0].value: there is no value 'nobody'"),
    (("buffers", "rows", 0, 7, 10**6), "buffers.rows[0].alias: there is no buffer 1000000"),
    (("train", "launches", "rows", 0, 0, ["i.l0"]), "rows[0].operations[0]: there is no operation of this program"),
    (("train", "launches", "rows", 0, 6, 1, 0, 10**6), "rows[0].accesses[1]: there is no buffer 1000000; there are"),
    (("train", "launches", "rows", 0, 6, 1, 0, True), "rows[0].accesses[1]: there is no buffer True"),
    (("train", "waits", 0, [0, 10**6]), "train.waits[0]: there is no launch 1000000"),
    (("infer", "entry", 0, -1), "infer.entry[0]: there is no buffer -1"),
    (("infer", "exit", 0, 10**6), "infer.exit[0]: there is no buffer"),
]


@pytest.mark.parametrize("path_and_value, message", NOWHERE, ids=[".".join(map(str, p[:-1])) for p, _ in NOWHERE])
def test_references_to_missing_parts(path_and_value, message):
    refused(changed(put(*path_and_value)), "MBC116", message)


def test_outside_the_arena():
    end = PLAN.predictions.arena_bytes
    refused(changed(put("buffers", "rows", 0, 8, end)), "MBC117", "buffers.rows[0].offset", "outside the arena")
    refused(changed(put("buffers", "rows", 0, 6, "host")), "MBC117", "outside the host of 0 bytes")
    refused(changed(put("predictions", "arena_bytes", 256)), "MBC117")


@given(st.data())
@settings(max_examples=150)
def test_no_change_of_a_field_breaks_the_reader(data):
    """Any JSON value at any place gives a plan or an MbcError, and no other exception."""
    document = json.loads(TEXT)
    parent, key, node = document, "format", document
    for _ in range(data.draw(st.integers(1, 8))):
        if isinstance(node, dict) and node:
            parent, key = node, data.draw(st.sampled_from(sorted(node)))
        elif isinstance(node, list) and node:
            parent, key = node, data.draw(st.integers(0, len(node) - 1))
        else:
            break
        node = parent[key]
    if key in ("format", "schema", "checksum"):
        return
    junk = st.one_of(
        st.none(), st.booleans(), st.integers(-2, 10**9), st.floats(allow_nan=False), st.text(max_size=4),
        st.lists(st.integers(0, 3), max_size=4), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    )  # fmt: skip
    parent[key] = data.draw(junk)
    document["checksum"] = content_checksum(document)
    try:
        assert isinstance(load_plan(json.dumps(document), "plan.json"), Plan)
    except MbcError as error:
        assert "MBC110" <= error.code <= "MBC117"


def test_whole_numbers_in_float_fields_are_written_as_floats():
    plan = replace(PLAN, predictions=replace(PLAN.predictions, train_us=7))
    assert encode_plan(plan)["predictions"]["train_us"] == 7.0
    assert '"train_us":7.0' in dump_plan(plan)
