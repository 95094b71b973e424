"""Runs the action lists of a pipeline in time: step time, bubble, timeline and live micro batches, exactly.

The model: a rank runs its actions one after the other in the listed order, each as soon as its input is there. A
tensor that crosses to another rank arrives `p2p_s` after the action that made it ended; links never queue, and a send
does not occupy its rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cost_models.errors import TitanPlanError
from cost_models.schedules import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, RankActions

if TYPE_CHECKING:
    from collections.abc import Sequence

Work = tuple[str, int, int]
"""(F, I or W; stage; micro batch): one unit of work that others wait for. A full backward counts as I."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAction:
    """An action with its place on the clock of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One simulated step.

    Attributes:
        step_time_s: end of the last action of any rank; the step starts at 0.
        busy_s: per rank, seconds inside actions.
        timeline: per rank, its actions in order with start and end.
    """

    step_time_s: float
    busy_s: tuple[float, ...]
    timeline: tuple[tuple[TimedAction, ...], ...]

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Per rank, seconds of the step in which it does nothing."""
        return tuple(self.step_time_s - busy for busy in self.busy_s)

    @property
    def worst_bubble_s(self) -> float:
        """Bubble of the rank with the most work, the one that an even split of the layers would relieve."""
        return self.step_time_s - max(self.busy_s)


def simulate(
    actions: Sequence[RankActions],
    forward_s: Sequence[float],
    input_grad_s: Sequence[float],
    weight_grad_s: Sequence[float],
    p2p_s: float = 0.0,
) -> SimulationResult:
    """Runs one step.

    Args:
        actions: per rank, from `schedule_actions`; which rank holds which stage is read from here.
        forward_s: per virtual stage, seconds of one micro batch.
        input_grad_s: per virtual stage; a full backward takes input_grad_s + weight_grad_s.
        weight_grad_s: per virtual stage.
        p2p_s: seconds from the end of an action until its output is at another rank.
    """
    seconds = {FORWARD: forward_s, INPUT_GRAD: input_grad_s, WEIGHT_GRAD: weight_grad_s}
    home = {action.stage: rank for rank, own in enumerate(actions) for action in own}
    _check_lengths(home, seconds)
    ended: dict[Work, float] = {}
    timeline: list[list[TimedAction]] = [[] for _ in actions]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(actions):
            done = timeline[rank]
            while len(done) < len(own):
                action = own[len(done)]
                ready_s = _ready_s(action, rank, home, ended, p2p_s)
                if ready_s is None:
                    break
                start_s = max(ready_s, done[-1].end_s if done else 0.0)
                end_s = start_s + _duration_s(action, seconds)
                done.append(TimedAction(action=action, start_s=start_s, end_s=end_s))
                ended[_unit(action)] = end_s
                moved = True
    _check_finished(actions, timeline)
    busy_s = tuple(sum(_duration_s(action, seconds) for action in own) for own in actions)
    step_time_s = max(done[-1].end_s for done in timeline if done)
    return SimulationResult(step_time_s=step_time_s, busy_s=busy_s, timeline=tuple(tuple(done) for done in timeline))


def needed_work(action: Action, last_stage: int) -> tuple[Work, ...]:
    """What must have ended, here or on another rank, before an action may start."""
    kind, stage, micro = action
    if kind == WEIGHT_GRAD:
        return ((INPUT_GRAD, stage, micro),)
    if kind == FORWARD:
        return ((FORWARD, stage - 1, micro),) if stage else ()
    own = (FORWARD, stage, micro)
    return (own,) if stage == last_stage else (own, (INPUT_GRAD, stage + 1, micro))


def peak_live(
    actions: Sequence[RankActions],
    weights: Sequence[float] | None = None,
    freed_by_input_grad: float = 0.0,
) -> tuple[float, ...]:
    """Per rank, the peak of the saved activations, each (stage, micro batch) weighing `weights[stage]`.

    A forward adds its weight when it starts, a full backward frees it when it ends. Of a split backward, the input
    gradient frees the share `freed_by_input_grad` (0 to 1), the weight gradient the rest. Only the order on the rank
    matters, so no times are needed.
    """
    if not 0.0 <= freed_by_input_grad <= 1.0:
        raise TitanPlanError("C610", f"freed_by_input_grad is {freed_by_input_grad}", "a share from 0 to 1")
    change = {FORWARD: 1.0, BACKWARD: -1.0, INPUT_GRAD: -freed_by_input_grad, WEIGHT_GRAD: freed_by_input_grad - 1.0}
    peaks = []
    for own in actions:
        live = peak = 0.0
        for action in own:
            live += change[action.kind] * (1.0 if weights is None else weights[action.stage])
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


def _unit(action: Action) -> Work:
    return (INPUT_GRAD if action.kind == BACKWARD else action.kind, action.stage, action.micro)


def _ready_s(action: Action, rank: int, home: dict[int, int], ended: dict[Work, float], p2p_s: float) -> float | None:
    """When the inputs of an action are at its rank; None while one has not been made."""
    ready_s = 0.0
    for work in needed_work(action, len(home) - 1):
        if work not in ended:
            return None
        ready_s = max(ready_s, ended[work] + (p2p_s if home[work[1]] != rank else 0.0))
    return ready_s


def _duration_s(action: Action, seconds: dict[str, Sequence[float]]) -> float:
    if action.kind == BACKWARD:
        return seconds[INPUT_GRAD][action.stage] + seconds[WEIGHT_GRAD][action.stage]
    return seconds[action.kind][action.stage]


def _check_lengths(home: dict[int, int], seconds: dict[str, Sequence[float]]) -> None:
    stages = len(home)
    if set(home) != set(range(stages)) or any(len(times) != stages for times in seconds.values()):
        got = {kind: len(times) for kind, times in seconds.items()}
        raise TitanPlanError(
            "S405", f"stages {sorted(home)} with stage times of length {got}", "one time a virtual stage, from 0"
        )


def _check_finished(actions: Sequence[RankActions], timeline: list[list[TimedAction]]) -> None:
    waiting = {
        rank: own[len(done)]
        for rank, (own, done) in enumerate(zip(actions, timeline, strict=True))
        if len(done) < len(own)
    }
    if waiting:
        shown = ", ".join(f"rank {rank} at {a.kind} stage {a.stage} micro {a.micro}" for rank, a in waiting.items())
        raise TitanPlanError("S406", f"deadlock: {shown}", "each waits for work that no rank can start")
