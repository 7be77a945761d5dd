"""Who the ranks are, and how they talk: Topology, its judge, and collectives by axis."""

from cplayers.mesh.topology import AXES, Coords, Topology
from cplayers.mesh.validate import legal_dcp, validate

__all__ = ["AXES", "Coords", "Topology", "legal_dcp", "validate"]
