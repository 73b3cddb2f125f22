"""The explicit cases of every law cover each pair of an engine and a required trait."""

import sys
from itertools import product
from unittest import mock

import pytest

from tests.properties import test_exact, test_many_calls, test_numerics
from tests.properties.cases import Case
from tests.properties.covering import COVERING, OPERATIONS, on, required, telling, traits

LAWS = {
    test_exact.test_equals_the_formula: ("collective", "chunked", "auto"),
    test_exact.test_equals_the_formula_between_threads: ("collective", "chunked"),
    test_exact.test_fused_kernels_equal_the_formula: ("triton",),
    test_numerics.test_nan_and_inf_come_out_as_plain_torch_gives_them: ("collective", "chunked", "triton"),
}


def lacking(cases: list[Case], engines: tuple[str, ...]) -> list[str]:
    """All required pairs that no case has."""
    missing = []
    for operation, engine in product(OPERATIONS, engines):
        of_pair = [case for case in cases if (case.operation, case.engine) == (operation, engine)]
        has = set().union(*(traits(case) for case in of_pair))
        missing += [f"{operation}, {engine}: {name}" for name in sorted(required(operation, engine) - has)]
    return missing


def reached(law, engines: tuple[str, ...]) -> list[Case]:
    """The cases that the explicit examples pass to a world; nothing is run."""
    cases: list[Case] = []

    def seen(function, *arguments, **_):
        closed = [cell.cell_contents for cell in function.__closure__ or ()]
        cases.extend(each for each in (*arguments, *closed) if isinstance(each, Case))

    def a_world(size):
        assert size >= 2
        return mock.Mock(run=seen)

    module = sys.modules[law.__module__]
    threads = mock.patch.object(module, "VirtualWorld", a_world, create=True)
    with mock.patch.object(module, "world", a_world), threads:
        parametrized = any(mark.name == "parametrize" for mark in getattr(law, "pytestmark", ()))
        for given in law.covering:
            for engine in engines if parametrized else (None,):
                law.hypothesis.inner_test(**given, **({"engine": engine} if engine else {}))
    return cases


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_explicit_cases_hold_every_pair(law):
    assert lacking(reached(law, LAWS[law]), LAWS[law]) == []


def test_the_calls_in_a_row_hold_every_pair():
    cases = [case for size in (2, 3, 4) for case in test_many_calls.always(size)]
    assert lacking(cases, test_many_calls.ENGINES) == []


def test_every_law_of_cases_is_held_to_it():
    """All laws except the one about cases, which calls no operation, and the many calls, which are checked above."""
    own = {
        law
        for module in (test_exact, test_numerics)
        for name, law in vars(module).items()
        if name.startswith("test_") and hasattr(law, "hypothesis")
    }
    assert own - set(LAWS) == {test_exact.test_cases_of_any_size_can_be_summed_exactly}


def test_a_case_that_shows_nothing_counts_for_nothing():
    base = COVERING[1]
    assert telling(base) and {"batch", "ragged", "bias"} <= traits(base)
    for change in ({"sizes": (1, 0, 0)}, {"features": 1}, {"local": ((3, 2), (0, 0), (3, 2))}):
        assert traits(type(base)(**vars(base) | change)) == set()
    assert lacking([on(case, "chunked") for case in COVERING[1:]], ("chunked",)) == []
    assert lacking([on(case, "chunked") for case in COVERING if case.batch is None], ("chunked",)) == [
        f"{operation}, chunked: {name}" for operation in OPERATIONS for name in ("batch", "bfloat16", "float32")
    ]
