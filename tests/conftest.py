"""Options of the whole suite: one thread per process, and shards of the slow tests."""

import os

# Before torch or numpy is imported: two OpenMP teams on the same cores wait for each other at every barrier.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_addoption(parser):
    parser.addoption("--shard", metavar="I/N", help="run only the I-th of N parts (from 0) of the selected test files")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """After the marks have selected: every N-th file, whole, so that its fixtures are made once.

    With fewer files than parts the parts wrap round: none is empty while there is anything to run.
    """
    option = config.getoption("--shard")
    if option is None:
        return
    index, count = _shard(option)
    files = sorted({item.path for item in items})
    chosen = {path for place, path in enumerate(files) if place % count == index % min(count, len(files))}
    config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
    items[:] = [item for item in items if item.path in chosen]


def pytest_sessionfinish(session, exitstatus):
    """A shard of nothing is no failure."""
    if session.config.getoption("--shard") is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def _shard(option):
    index, slash, count = option.partition("/")
    if not slash or not index.isdigit() or not count.isdigit() or not int(index) < int(count):
        raise pytest.UsageError(f"--shard {option}: must be I/N with 0 <= I < N, e.g. 0/4")
    return int(index), int(count)
