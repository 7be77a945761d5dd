"""A layer says which backends attend: as it was told, or what "auto" takes."""

from __future__ import annotations

import pytest
import torch

from cplayers.attention import DCPGQAAttention, DCPMLAAttention, PCPPrefillAttention
from cplayers.mesh import CPMesh, Topology

MESH = CPMesh(Topology())
CPU_PAGED = {"decode": "native (paged)", "prefill": "cpu"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, CPU_PAGED),
        ({"softcap": 3.0}, {"decode": "math", "prefill": "math"}),
        ({"backend": "math"}, {"decode": "math", "prefill": "math"}),
        ({"backend": "native"}, {"decode": "native (paged)", "prefill": "native"}),
    ],
)
def test_of_a_grouped_layer(options: dict[str, object], expected: dict[str, str]) -> None:
    layer = DCPGQAAttention(32, 4, 2, 16, layer_idx=0, mesh=MESH, **options)  # type: ignore[arg-type]
    assert layer.local_backends() == expected
    if not options:  # 2 rows of a KV head for each new token, of which "native" takes up to 512
        assert layer.local_backends(256) == CPU_PAGED
        assert layer.local_backends(257) == {"decode": "cpu", "prefill": "cpu"}
        assert layer.double().local_backends() == {"decode": "cpu", "prefill": "cpu"}


def test_of_a_latent_layer() -> None:
    core = PCPPrefillAttention(backend="flash_cpu", mesh=MESH)
    layer = DCPMLAAttention(32, 4, None, 32, 16, 16, 16, layer_idx=0, prefill=core, mesh=MESH)
    assert layer.local_backends() == {"decode": "native (paged)", "prefill": "flash_cpu"}
    assert layer.to(torch.float16).local_backends()["decode"] == "math"
