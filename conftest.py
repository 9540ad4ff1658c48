"""The tiers of the tests: `unit`, `guarantee` and `nightly`. `make test` runs the first two, `make test-all` everything.

unit        no other process, no accountant: the code as it is, in under a minute
guarantee   clipping, noise, ledger, runs, attacks: what the promise rests on, in a few minutes
nightly     pages of the documentation, torchrun, faults by system calls, experiments, properties of the accountants
"""

import pytest

GUARANTEE = (
    *("tests/attacks/", "tests/clipping/", "tests/distributed/", "tests/fit/", "tests/privacy/", "tests/statistics/"),
    *(
        "tests/training/",
        "tests/trust/",
        "tests/report/",
        "tests/serve/",
        "tests/test_estimator.py",
        "tests/test_export.py",
    ),
    *(
        "tests/test_cli_plan.py",
        "tests/test_nano.py",
        "tests/data/test_prepare_command.py",
        "tests/models/test_transitions.py",
    ),
)
NIGHTLY = (
    *(
        "experiments/",
        "tests/distributed/test_lost.py",
        "tests/distributed/test_torchrun.py",
    ),
    *("tests/fit/test_finish.py", "tests/privacy/test_accounting.py", "tests/serve/test_fuzz.py", "tests/test_docs.py"),
    "tests/clipping/test_architectures.py::test_all",
    *("tests/test_examples.py", "tests/test_notebooks.py", "tests/trust/test_faults.py", "tests/trust/test_fuzz.py"),
    "tests/trust/test_audit.py::test_a_small_audit",
)


def tier_of(path: str) -> str:
    """The tier of a file, by its path from the root; a longer entry does not matter, `nightly` goes first."""
    if path.startswith(NIGHTLY):
        return "nightly"
    return "guarantee" if path.startswith(GUARANTEE) else "unit"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier."""
    for item in items:
        item.add_marker(tier_of(item.nodeid))
