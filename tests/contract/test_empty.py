"""Empty problems, and outputs that are written completely: torch.empty gives NaN here."""

from __future__ import annotations

from farro.testing import assert_bit_equal, guarded

from .conftest import inexact
from .samples import tensors


def test_scenario_06_empty(run, refused, sample, kernel, device, generator, poison) -> None:
    for name, options in sample.empties.items():
        inputs = sample.inputs(generator, device, **options)
        if refused(inputs) or inexact(inputs):
            continue
        for i, (actual, expected) in enumerate(zip(run(inputs), sample.empty_result(inputs))):
            assert actual.device == device
            assert actual.is_contiguous()
            assert_bit_equal(actual, expected, f"{name}, result {i}")


def test_scenario_06_empty_through_auto(sample, device, generator, poison) -> None:
    for name, options in sample.empties.items():
        inputs = sample.inputs(generator, device, **options)
        if inexact(inputs):
            continue
        results = tensors(sample.function(**inputs))
        for actual, expected in zip(results, sample.empty_result(inputs)):
            assert_bit_equal(actual, expected, name)


def test_outputs_are_written_completely(run, accepted, sample, kernel, device, poison) -> None:
    for name, inputs in accepted(faithful=True):
        expected = tensors(sample.function(**inputs, backend="reference"))
        for i, (actual, want) in enumerate(zip(run(inputs), expected)):
            sample.compare(actual, want, f"{name}, result {i}")


def test_scenario_07_out_is_written_completely_and_nothing_beside_it(
    run, accepted, refused, sample, takes_out, kernel, device, generator, poison
) -> None:
    empties = [(n, sample.inputs(generator, device, **o)) for n, o in sample.empties.items()]
    for name, inputs in accepted() + [e for e in empties if refused(e[1]) is None]:
        shape, dtype = sample.out(inputs)
        place = guarded(shape, dtype, sample.out_layout, device)
        if refused({**inputs, "out": place.view}):
            continue
        sample.place(place.view)
        (result,) = run(inputs, out=place.view)
        assert result is place.view
        assert place.overwritten() == 0, name
        assert_bit_equal(result, *run(inputs), name)


def test_inputs_are_only_read(run, accepted, sample, kernel, device) -> None:
    for name, inputs in accepted():
        before = {n: t.clone() for n, t in sample.present(inputs).items()}
        run(inputs)
        for argument, tensor in sample.present(inputs).items():
            assert_bit_equal(tensor, before[argument], f"{name}: {argument}")
