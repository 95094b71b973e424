"""Deferred weight gradients run once, in order, and add up as autograd's do."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from runtime.parallel.weight_gradients import WeightGradients


def test_work_is_taken_once_and_runs_in_order() -> None:
    store, done = WeightGradients(), []
    for number in range(3):
        store.defer(lambda number=number: done.append(number))
    first = store.take()
    store.defer(lambda: done.append(9))
    second = store.take()
    assert done == []
    second()
    first()
    first()
    assert done == [9, 0, 1, 2]


def test_delivered_gradients_add_up_and_are_told() -> None:
    store, parameter, told = WeightGradients(), Parameter(torch.zeros(2)), []
    store.on_gradient = told.append
    store.deliver(parameter, torch.ones(2))
    store.deliver(parameter, torch.full((2,), 2.0))
    assert torch.equal(parameter.grad, torch.full((2,), 3.0))
    assert told == [parameter, parameter]


def test_a_whole_run_needs_no_gradients_of_its_own() -> None:
    store, weight = WeightGradients(), torch.ones(2, requires_grad=True)
    seen: list[bool] = []
    store.defer(lambda: seen.append((weight * 2).requires_grad))
    store.take()()
    assert seen == [False]
