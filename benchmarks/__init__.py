"""The library beside its peers and the limits of the machine; see docs/performance.md."""
