"""Composable context-parallel attention layers for long-context inference."""

__version__ = "0.1.0"
