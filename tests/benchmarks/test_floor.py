"""The least that a decode step can take, from given rates."""

import pytest

from benchmarks.lib.models import MODELS
from benchmarks.table.floor import Rates, decode_floor


def test_models_have_the_sizes_in_their_names() -> None:
    assert MODELS["54m"].num_parameters == pytest.approx(54e6, rel=0.01)
    assert MODELS["473m"].num_parameters == pytest.approx(473e6, rel=0.01)


def test_weights_and_keys_and_values_are_read_once() -> None:
    # 0.95 GB of weights and 32 x 250 x 112 KiB of keys and values, at 27 GB/s.
    rates = Rates(bytes_per_second=27e9, operations_per_second=1e18)
    assert decode_floor(MODELS["473m"], rates, 32, 250) == pytest.approx(0.069, abs=0.0005)


def test_operations_bound_a_machine_that_computes_slowly() -> None:
    rates = Rates(bytes_per_second=1e18, operations_per_second=1e12)
    shape = MODELS["54m"]
    weights_alone = 2 * 64 * shape.num_parameters / 1e12
    assert decode_floor(shape, rates, 64, 0) == pytest.approx(weights_alone)
    # Each of 12 x 8 heads of 64 multiplies and adds 250 keys and as many values.
    attention = 64 * 250 * 12 * 8 * 64 * 4 / 1e12
    assert decode_floor(shape, rates, 64, 250) == pytest.approx(weights_alone + attention)
