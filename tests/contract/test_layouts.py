"""Views are read and written in place, with the bits that contiguous copies give."""

from __future__ import annotations

import pytest
import torch

import farro
from farro.testing import LAYOUTS, assert_bit_equal, guarded, laid_out

from .samples import tensors


def _check(run, refused, sample, inputs, changes, want, what) -> None:
    """The kernel gives `want`, or says why not and leaves the call to another."""
    if refused({**inputs, **changes}):
        with pytest.raises(farro.UnsupportedError):
            run(inputs, **changes)
        results = tensors(sample.function(**{**inputs, **changes}))
    else:
        results = run(inputs, **changes)
    for result, expected in zip(results, want):
        assert_bit_equal(result, expected, what)


def _some(items: list, count: int, generator: torch.Generator) -> list:
    """A few of them, others in each run."""
    return [items[i] for i in torch.randperm(len(items), generator=generator)[:count].tolist()]


def test_scenario_04_each_argument_in_each_layout(
    run, accepted, refused, sample, kernel, device, exhaustive, generator
) -> None:
    """On a GPU each layout compiles a kernel of its own: but for the exhaustive run, a few."""
    for variant, inputs in accepted():
        present = sample.present(inputs)
        first = variant == next(iter(sample.variants))
        if device.type == "cuda" and not first and all(t.dim() < 3 for t in present.values()):
            continue
        for name, tensor in present.items():
            layouts = [n for n in sample.arguments[name].layouts if n != "contiguous"]
            if not exhaustive:
                layouts = _some(layouts, 2 if first else 1, generator)
                if not first and tensor.dim() < 3:
                    continue
            for layout in layouts:
                place = laid_out(tensor, layout, device)
                # dense, its dimensions in the order that the kernel takes
                want = run({**inputs, name: torch.empty_like(tensor).copy_(place.view)})
                what = f"{variant}: {name} {layout}"
                _check(run, refused, sample, inputs, {name: place.view}, want, what)
                assert place.changed() == 0, f"{what}: written to"


def test_scenario_04_all_arguments_in_views(
    run, accepted, refused, sample, kernel, device, exhaustive, generator
) -> None:
    """Every argument in a layout of its own, over all variants; where they compile, over two."""
    variants = list(enumerate(accepted()))
    for number, (name, inputs) in variants if exhaustive else _some(variants, 2, generator):
        for shift in range(3) if exhaustive else (number % 3,):
            changes, copies = {}, {}
            for i, (argument, tensor) in enumerate(sample.present(inputs).items()):
                layouts = sample.arguments[argument].layouts
                layout = layouts[(shift * 5 + i * 3) % len(layouts)]
                changes[argument] = view = laid_out(tensor, layout, device).view
                copies[argument] = view.clone()  # dense, its dimensions in the view's order
            if refused({**inputs, **copies}):
                continue
            want = run({**inputs, **copies})
            _check(run, refused, sample, inputs, changes, want, f"{name}, {shift}")


def test_scenario_04_out_in_each_layout(
    run, accepted, refused, sample, takes_out, kernel, device
) -> None:
    _, inputs = accepted()[0]
    want = run(inputs)
    shape, dtype = sample.out(inputs)
    for layout in (name for name in sample.out_layouts if not LAYOUTS[name].windows):
        place = guarded(shape, dtype, layout, device)
        sample.place(place.view)
        _check(run, refused, sample, inputs, {"out": place.view}, want, f"out {layout}")
        assert place.overwritten() == 0, layout


def test_interleaved_out(run, accepted, sample, takes_strided_out, kernel, device) -> None:
    """Strides that interleave but never meet: every other column of an odd number of them."""
    _, inputs = accepted()[0]
    (rows, columns), dtype = sample.out(inputs)
    buffer = torch.full((rows, 2 * columns - 1), float("nan"), dtype=dtype, device=device)
    (result,) = run(inputs, out=buffer[:, ::2])
    assert_bit_equal(result, *run(inputs))
    assert buffer[:, 1::2].isnan().all()


def test_overlapping_out_is_refused(run, sample, takes_strided_out, device, generator) -> None:
    inputs = sample.first(generator, device)
    (rows, columns), dtype = sample.out(inputs)
    buffer = torch.full((rows + columns,), 7.0, dtype=dtype, device=device)
    for out in (
        buffer.as_strided((rows, columns), (1, 1)),
        buffer.as_strided((rows, columns), (0, 1)),
        buffer.as_strided((rows, columns), (1, 0)),
    ):
        with pytest.raises(ValueError, match=rf"{sample.name}: out .*strides"):
            run(inputs, out=out)
    assert (buffer == 7).all()


def test_scenario_04_zero_strides_are_refused(sample, device, generator) -> None:
    """An expanded tensor of more than one element along the expanded dimension."""
    inputs = sample.first(generator, device)
    for name, tensor in sample.present(inputs).items():
        for dimension in range(tensor.dim()):
            if tensor.shape[dimension] == 1:  # there a stride means nothing
                continue
            expanded = tensor.narrow(dimension, 0, 1).expand(tensor.shape)
            with pytest.raises(ValueError, match=rf"{sample.name}: {name} .*zero stride"):
                sample.function(**{**inputs, name: expanded})


def test_zero_strides_that_repeat_nothing_are_read(sample, device, generator) -> None:
    """Along a dimension of one element, and in empty tensors, a stride means nothing."""
    inputs = sample.first(generator, device, m=1)
    want = tensors(sample.function(**inputs))
    for name, tensor in sample.present(inputs).items():
        if sample.arguments[name].rows == 0:
            view = tensor.as_strided(tensor.shape, (0, *tensor.stride()[1:]))
            for result, expected in zip(tensors(sample.function(**{**inputs, name: view})), want):
                assert_bit_equal(result, expected, name)
    empty = sample.first(generator, device, m=0)
    for name, tensor in sample.present(empty).items():
        if sample.arguments[name].rows == 0:
            view = tensor.as_strided(tensor.shape, [0] * tensor.dim())
            sample.function(**{**empty, name: view})
