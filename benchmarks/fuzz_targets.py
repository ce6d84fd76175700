"""The targets of `fuzz.py`: for each kind of input the seeds, the mutation, and the code that reads the input."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import fuzz_mutations as mutations
from fuzz_files import (
    archives,
    checkpoints,
    judge_archive,
    judge_checkpoint,
    judge_plan,
    judge_profile,
    judge_source,
    plan_texts,
    profiles,
    sources,
    words,
)
from fuzz_lines import judge_line, line_words, lines
from fuzz_onnx import change_onnx, judge_onnx, models
from fuzz_rule import Target

_ALL = (
    Target("sources", sources, lambda data, draw: mutations.change_words(words())(data, draw), judge_source, 0.15),
    Target("plans", lambda: list(plan_texts()), mutations.change_json, judge_plan, 0.05),
    Target("checkpoints", checkpoints, mutations.change_checkpoint, judge_checkpoint, 0.3),
    Target("profiles", profiles, mutations.change_database, judge_profile, 0.15),
    Target("archives", archives, mutations.change_archive, judge_archive, 0.2),
    Target("onnx", models, change_onnx, judge_onnx, 0.05),
    Target(
        "command_lines", lines, lambda data, draw: mutations.change_lines(line_words())(data, draw), judge_line, 0.1
    ),
)
# Without the package onnx there is nothing that reads its files.
TARGETS: Mapping[str, Target] = {
    target.name: target for target in _ALL if target.name != "onnx" or importlib.util.find_spec("onnx") is not None
}
