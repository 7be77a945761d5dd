"""Who the ranks are, and how they talk: Topology, its judge, and collectives by axis."""

from cplayers.mesh.mesh import CPMesh
from cplayers.mesh.ring import Ring
from cplayers.mesh.topology import AXES, Coords, Topology
from cplayers.mesh.traffic import TrafficLog, TrafficRecord
from cplayers.mesh.validate import legal_dcp, validate

__all__ = [
    "AXES",
    "CPMesh",
    "Coords",
    "Ring",
    "Topology",
    "TrafficLog",
    "TrafficRecord",
    "legal_dcp",
    "validate",
]
