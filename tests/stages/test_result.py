"""What every stage returns: its seconds, and a line in the log."""

import logging
from dataclasses import FrozenInstanceError, dataclass

import pytest

from sklearn_mhal.stages._result import StageResult, timed


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer(StageResult):
    value: int


@timed
def find_answer(question: str, *, factor: int = 1) -> Answer:
    """Answer it."""
    return Answer(value=42 * factor, message=f"looked up {question}", n_samples=7)


def test_seconds_are_filled_in():
    result = find_answer("everything", factor=2)
    assert result.value == 84 and result.n_samples == 7 and 0.0 < result.seconds < 10.0
    assert find_answer.__doc__ == "Answer it." and find_answer.__name__ == "find_answer"


def test_message_is_logged(caplog):
    with caplog.at_level(logging.INFO, "sklearn_mhal"):
        find_answer("everything")
    (record,) = caplog.records
    assert record.name == "sklearn_mhal" and "find_answer" in record.message
    assert "looked up everything" in record.message


def test_results_are_frozen():
    with pytest.raises(FrozenInstanceError):
        find_answer("everything").value = 3
