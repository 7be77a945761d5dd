"""The checks of layers that GPU tests run, on the CPU: they pass, and they can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from layer_cases import LAYERS, check_layer, check_replayed


@pytest.mark.parametrize("name", LAYERS)
def test_layers_pass(name: str) -> None:
    check_layer(name, torch.float32, "cpu", "auto")
    check_replayed(name, "cpu", lambda step: step)


def test_a_recording_that_does_not_see_new_steps_fails() -> None:
    def frozen(step: Callable[[], None]) -> Callable[[], None]:
        step()
        return lambda: None

    with pytest.raises(AssertionError):
        check_replayed("gqa", "cpu", frozen)
