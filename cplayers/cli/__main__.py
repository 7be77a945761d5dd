"""``python -m cplayers.cli``, which torchrun can start."""

from cplayers.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
