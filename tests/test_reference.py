"""Every built-in method still gives the numbers of the first release, to 1e-12, on the engine "loop"."""

import json

import pytest

from reference import FILE, cases, differences, measured

BEFORE = json.loads(FILE.read_text())
CASES = {name: settings for name, settings in cases() if name.endswith("/loop/float64") and name in BEFORE}


def test_every_case_was_recorded() -> None:
    assert len(CASES) == sum(name.endswith("/loop/float64") for name, _ in cases())


@pytest.mark.parametrize("name", CASES)
def test_a_method_gives_the_numbers_of_the_first_release(name: str) -> None:
    before, now = BEFORE[name], json.loads(json.dumps(measured(CASES[name])))
    method = name.partition("/")[0]
    if method == "fedmatch":
        # in rounds with helpers, places of helpers that do not exist travel as zeros, and are counted now
        for one in (before, now):
            one["bytes"] = [size for round, size in enumerate(one["bytes"], 1) if round % 10]
    assert not differences(before, now, 1e-12)
