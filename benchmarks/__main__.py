"""`python -m benchmarks`: run the suite, print tables and bars, write JSON and plots."""

from __future__ import annotations

import hydra
from omegaconf import OmegaConf

from benchmarks.settings import Settings, register
from benchmarks.suite import run_suite


def main() -> None:
    register()
    hydra.main(version_base="1.3", config_path="conf", config_name="bench")(_run)()


def _run(config: Settings) -> None:
    settings = OmegaConf.to_object(config)  # type: ignore[arg-type]
    assert isinstance(settings, Settings)
    run_suite(settings)


if __name__ == "__main__":
    main()
