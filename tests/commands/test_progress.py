"""The lines about the progress of a task: when they come, and how much longer it takes."""

import logging

import pytest

from megatron.context_parallel import progress


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, progress.logger.name)
    return lambda: [record.getMessage() for record in caplog.records]


def test_lines_come_after_two_seconds_and_then_every_ten(lines):
    now = 0.0
    task = progress.Progress("loading weights", 10, clock=lambda: now)
    for _ in range(10):
        now += 1.5
        task.advance()
    assert lines() == [
        "loading weights: 2 of 10, about 12 s left",
        "loading weights: 9 of 10, about 2 s left",
    ]


def test_amounts_are_shown_in_their_unit(lines):
    now = 0.0
    task = progress.Progress("verifying a", 4 * 10**9, progress.gigabytes, clock=lambda: now)
    now = 3.0
    task.advance(10**9)
    assert lines() == ["verifying a: 1.0 GB of 4.0 GB, about 9 s left"]


def test_only_the_first_rank_reports(lines, monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0)
    monkeypatch.setenv("RANK", "1")
    assert list(progress.tracked("abc", "making plans")) == ["a", "b", "c"] and not lines()
    monkeypatch.setenv("RANK", "0")
    assert list(progress.tracked("abc", "making plans")) == ["a", "b", "c"]
    assert lines() == ["making plans: 1 of 3, about 0 s left"]
