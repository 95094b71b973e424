"""Degrees and batches of config.yaml: what is missing is derived, what contradicts is shown with its arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from .config_sections import DistributedSection, TrainingSection


class Batch(NamedTuple):
    """Sequences: of a device at a time, times a step, and of a step over all devices."""

    micro_batch: int
    accumulation: int
    global_batch: int


class Devices(NamedTuple):
    """How many devices there are, and who says so; 0 where nobody does."""

    total: int
    who: str


def data_parallel_size(
    distributed: DistributedSection, training: TrainingSection, devices: Devices, origin: str
) -> int:
    """dp_size as given, or what the devices leave for it, or what a full set of batch sizes asks for, or 1."""
    inner = distributed.tp_size * distributed.cp_size * distributed.pp_size
    dp = distributed.dp_size
    if devices.total:
        if dp is None and devices.total % inner == 0:
            return devices.total // inner
        if inner * (dp or 1) != devices.total or dp is None:
            raise TitanPlanError("T310", f"{origin}: {_product(distributed, devices)}", _degree_hint(inner, devices))
    if dp is not None:
        return dp
    sizes = (training.batch_size, training.micro_batch_size, training.gradient_accumulation_steps)
    if None in sizes:
        return 1
    batch, micro, accumulation = (size or 1 for size in sizes)
    return max(batch // (micro * accumulation), 1)  # a rest is told by `batch_sizes`


def _product(distributed: DistributedSection, devices: Devices) -> str:
    names = ("tp_size", "cp_size", "pp_size", *(("dp_size",) if distributed.dp_size is not None else ()))
    sizes = {name: getattr(distributed, name) for name in names}
    total = 1
    for size in sizes.values():
        total *= size
    shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name != "cp_size")
    return f"{shown} = {total}, {devices.who} {devices.total} devices"


def _degree_hint(inner: int, devices: Devices) -> str:
    if devices.total % inner == 0:
        right = devices.total // inner
        return f"dp_size would have to be {right} ({devices.total} / {inner} = {right})"
    return f"{inner} does not divide {devices.total}: another tp_size, cp_size or pp_size is needed"


def batch_sizes(training: TrainingSection, dp: int, origin: str) -> Batch:
    """The three batch sizes; a missing one is derived from the other two, and all must multiply exactly."""
    batch, micro, accumulation = (
        training.batch_size,
        training.micro_batch_size,
        training.gradient_accumulation_steps,
    )
    if batch is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro, accumulation, micro * accumulation * dp)
    if micro is None and accumulation is None:
        micro = 1
    if accumulation is None and micro is not None:
        return Batch(micro, _quotient(batch, micro, dp, "micro_batch_size", origin), batch)
    if micro is None and accumulation is not None:
        return Batch(_quotient(batch, accumulation, dp, "gradient_accumulation_steps", origin), accumulation, batch)
    found = Batch(micro or 1, accumulation or 1, batch)
    _check_product(found, dp, origin)
    return found


def _quotient(batch: int, given: int, dp: int, name: str, origin: str) -> int:
    """Derive the size that is not given."""
    unit = given * dp
    if batch % unit:
        message = (
            f"{origin}: batch_size {batch} does not split over {name} {given} x dp_size {dp} = {unit}: "
            f"{batch} / {unit} leaves {batch % unit}"
        )
        raise TitanPlanError("B501", message, f"batch_size would have to be {_multiples(batch, unit)}")
    return batch // unit


def _check_product(given: Batch, dp: int, origin: str) -> None:
    product = given.micro_batch * given.accumulation * dp
    if product == given.global_batch:
        return
    message = (
        f"{origin}: micro_batch_size {given.micro_batch} x gradient_accumulation_steps {given.accumulation} x "
        f"dp_size {dp} = {product}, batch_size is {given.global_batch}"
    )
    raise TitanPlanError("B501", message, _batch_hint(given, dp, product))


def _batch_hint(given: Batch, dp: int, product: int) -> str:
    unit = given.micro_batch * dp
    if given.global_batch % unit:
        near = _multiples(given.global_batch, unit)
        return f"batch_size would have to be {product}, or a multiple of {given.micro_batch} x {dp} such as {near}"
    right = given.global_batch // unit
    return (
        f"gradient_accumulation_steps would have to be {right} "
        f"({given.global_batch} / ({given.micro_batch} x {dp}) = {right}), or batch_size {product}"
    )


def _multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
