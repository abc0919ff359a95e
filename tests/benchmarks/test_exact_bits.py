from __future__ import annotations

import pytest
import torch

from benchmarks.exact_bits import ALGORITHMS, WORLDS, Case, cases, digest, verdict


def test_no_two_cases_have_one_name_and_each_recipe_has_its_reference_first() -> None:
    found = list(cases())
    assert len({case.name for case in found}) == len(found)
    firsts = {case.recipe: case for case in reversed(found)}
    assert all((case.workers, case.algorithm, case.settings) == ((1,), "backend", ()) for case in firsts.values())
    wanted = {(workers, algorithm) for workers in WORLDS[1:] for algorithm in ALGORITHMS}
    assert wanted <= {(case.workers[0], case.algorithm) for case in found if case.recipe == "demo"}


@pytest.mark.parametrize("other", [{"a": [1, 2.5]}, {"a": [torch.ones(1, 3)]}, {"b": [torch.ones(3)]}, {}])
def test_a_digest_sees_what_differs(other: object) -> None:
    assert digest({"a": [torch.ones(3)]}) == digest({"a": [torch.ones(3)]})
    assert digest({"a": [torch.ones(3)]}) != digest(other)


def test_an_evaluation_more_is_no_difference_and_another_result_is() -> None:
    """A run that was stopped has evaluated what it left then."""
    wanted = {"weights": "1f", "evaluations": {"30": [0.5, 1.0]}}
    case, control = Case("demo", (2,)), Case("demo", (2,), differs="sums in floats")
    assert verdict(case, {"weights": "1f", "evaluations": {"20": [0.4, 1.5], "30": [0.5, 1.0]}}, wanted) == "equal"
    changed = {"weights": "1f", "evaluations": {"30": [0.5, 1.1]}}
    assert verdict(case, changed, wanted) == "DIFFERENT: evaluations"
    assert verdict(control, changed, wanted) == "differs, as it must (sums in floats)"
    assert verdict(control, wanted, wanted) == "EQUAL although sums in floats"
