"""Objects of mbc in notebooks: IPython finds them by name, so that nothing is imported before it is needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import mbc
from mbc.fit import BatchFit, BudgetCurve, Probe, figures
from mbc.plan.model import Plan
from mbc.runtime.module import Module
from tests.plan.chains import random_plan

PLAN = random_plan(3)


class HtmlFormatter:
    """The two methods of IPython's formatter that mbc uses, which look up classes by module and name."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], Callable[[Any], str]] = {}

    def for_type_by_name(self, type_module: str, type_name: str, func: Callable[[Any], str]) -> None:
        self.functions[type_module, type_name] = func

    def function_for(self, kind: type) -> Callable[[Any], str]:
        return self.functions[kind.__module__, kind.__name__]


@pytest.fixture
def html(monkeypatch: pytest.MonkeyPatch) -> HtmlFormatter:
    formatter = HtmlFormatter()
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter}))
    ipython = ModuleType("IPython")
    vars(ipython)["get_ipython"] = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    importlib.reload(mbc)
    return formatter


def test_each_class_that_notebooks_show_is_registered(html: HtmlFormatter):
    assert {html.function_for(kind) for kind in (Plan, Module, BatchFit, BudgetCurve)} == set(html.functions.values())


def test_a_module_is_shown_as_its_plan(html: HtmlFormatter):
    shown = html.function_for(Plan)(PLAN)
    assert shown.startswith("<div>") and "<svg" in shown and PLAN.graph.name in shown
    assert html.function_for(Module)(SimpleNamespace(plan=PLAN)) == shown


def test_a_fit_is_shown_as_its_table(html: HtmlFormatter):
    one = figures(PLAN)
    batches = BatchFit((Probe(one.batch, one),), one, one)
    budgets = BudgetCurve((Probe(one.budget_bytes, one),), one)
    for fit in (batches, budgets):
        assert html.function_for(type(fit))(fit).startswith("<pre>")


def test_mbc_can_be_imported_without_ipython_and_outside_its_shell(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert importlib.reload(mbc) is mbc
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert importlib.reload(mbc) is mbc
