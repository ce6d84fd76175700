"""Options, hooks and fixtures of all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One thread each: the tests run in several processes, whose BLAS threads would wait for each other. NumPy reads this
# when it is imported, so nothing above may import it; the workers of pytest-xdist inherit it.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

pytest_plugins = ("tests.shares",)
GPU = Path(__file__).parent / "gpu"

# The same draws in every run, and none too slow on a busy machine: what fails does so for a change.
# `pytest --hypothesis-profile=anew` draws anew each time.
settings.register_profile("anew", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", parent=settings.get_profile("anew"), derandomize=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-expected", action="store_true", help="write expected texts and digests anew")


def _leaves_out(config: pytest.Config) -> bool:
    return not (os.environ.get("MBC_ALL_TESTS") or config.getoption("--update-expected"))


def pytest_report_header(config: pytest.Config) -> str:
    return "without the exhaustive tests, which make test-all runs" if _leaves_out(config) else "all tests"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep tests, of which there are thousands, out of garbage collection: the collector would search them in vain."""
    from mbc.collection import uncollected

    with uncollected():
        result = yield
    gc.freeze()
    return result


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that cannot run on this machine.

    Skipping takes some milliseconds a test, and there are twenty thousand tests. On a machine without a GPU, one test
    of each file that needs a GPU stays selected, so that the file is reported as skipped.
    """
    from mbc.hardware.target import local_gpus  # which imports NumPy

    has_gpu, reported = bool(local_gpus()), set[Path]()

    def stays(item: pytest.Item) -> bool:
        if _leaves_out(config) and item.get_closest_marker("exhaustive"):
            return False
        if has_gpu or GPU not in item.path.parents:
            return True
        is_first = item.path not in reported
        reported.add(item.path)
        return is_first

    kept = [item for item in items if stays(item)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept
    if hasattr(config, "workerinput"):
        for item in items:
            if not (item.get_closest_marker("xdist_group") or item.get_closest_marker("exhaustive")):
                item.add_marker(pytest.mark.xdist_group(_group_of(item.path)))


def _group_of(path: Path) -> str:
    """Return the group of tests that one worker of pytest-xdist runs, because they share plans and libraries.

    That is a file, or a folder of tests of the search. Workers that took turns would each make what is shared.
    """
    return path.parent.name if path.parent.parent.name == "optimize" else path.stem


@pytest.fixture
def update_expected(request: pytest.FixtureRequest) -> bool:
    """Return True if the expected texts are to be written again, after an intended change."""
    return bool(request.config.getoption("--update-expected"))
