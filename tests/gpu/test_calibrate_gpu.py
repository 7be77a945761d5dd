"""Calibration on a CUDA device, by one rank: figures that no launch could explain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cplayers import CPMesh, Topology
from cplayers.planning import calibrate

pytestmark = pytest.mark.gpu


def test_a_device_is_measured_and_not_its_launches(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    mesh = CPMesh(Topology(), "cuda")
    found = calibrate(mesh, dtype=torch.bfloat16, path=file)
    assert torch.cuda.get_device_name() in found.key
    # products of 768 x 768 at 20 us a launch would be 4.5e13 on the fastest device
    assert 1e12 < found.flops < 1e16
    assert 1e10 < found.memory_bandwidth < 5e13
    assert calibrate(mesh, dtype=torch.bfloat16, path=file) == found
