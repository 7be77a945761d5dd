"""Knowing what to run: memory, traffic and time of a model on a layout, before there are ranks."""

from cplayers.planning.advice import Advice, advise
from cplayers.planning.budget import Budget, budget_of
from cplayers.planning.calibrate import Calibration, calibrate
from cplayers.planning.crossover import Crossovers, crossovers
from cplayers.planning.memory import KVMemory, cache_spec, check_layout, sizes_of
from cplayers.planning.plan import Candidate, Choices, Load, candidates, layouts
from cplayers.planning.shape import ModelShape, model_presets
from cplayers.planning.speeds import (
    Assumed,
    Call,
    Hardware,
    Link,
    Speeds,
    hardware_presets,
)
from cplayers.planning.times import Seconds, TimeModel
from cplayers.planning.weights import Weights, weights_of

__all__ = [
    "Advice",
    "Assumed",
    "Budget",
    "Calibration",
    "Call",
    "Candidate",
    "Choices",
    "Crossovers",
    "Hardware",
    "KVMemory",
    "Link",
    "Load",
    "ModelShape",
    "Seconds",
    "Speeds",
    "TimeModel",
    "Weights",
    "advise",
    "budget_of",
    "cache_spec",
    "calibrate",
    "candidates",
    "check_layout",
    "crossovers",
    "hardware_presets",
    "layouts",
    "model_presets",
    "sizes_of",
    "weights_of",
]
