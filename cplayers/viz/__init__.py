"""Drawings of what the library does, for documentation and for looking at a configuration."""

from cplayers.viz.placement import placement_svg

__all__ = ["placement_svg"]
