"""The ``cplayers`` command: `cplayers.cli.main.main`."""

__all__: list[str] = []
