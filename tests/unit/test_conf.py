"""The Hydra configuration: what is shipped composes, builds, and agrees with the constructors."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import get_class, instantiate

import cplayers.conf
from cplayers.attention import DCPGQAAttention, PCPPrefillAttention
from cplayers.cache import CacheConfig
from cplayers.conf import register_configs
from cplayers.conf.schema import RUNTIME, SCHEMAS
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh, Topology

CONF = Path(cplayers.conf.__file__).parent
EXAMPLES = Path(__file__).parents[2] / "examples"
SHIPPED = sorted(str(path.relative_to(CONF).with_suffix("")) for path in CONF.rglob("*.yaml"))
APP = """
defaults:
  - mesh: single
  - cache: default
  - attention: gqa
  - prefill: auto
  - _self_
hydra:
  searchpath: [pkg://cplayers.conf]
"""


@pytest.fixture
def compose_app(tmp_path: Path) -> Any:
    """Compose an application's config as its command line would."""
    (tmp_path / "app.yaml").write_text(APP)
    register_configs()
    register_configs()  # calling it twice is allowed
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        yield lambda *overrides: compose("app", list(overrides))
    GlobalHydra.instance().clear()


def test_every_group_is_shipped() -> None:
    assert {name.split("/")[0] for name in SHIPPED} == {"mesh", "cache", "attention", "prefill"}
    assert {"mesh/single", "mesh/pcp2_dcp2", "mesh/tp3_pcp2_dcp2", "mesh/tp9_dcp3"} <= set(SHIPPED)


def expected_of(name: str) -> Any:
    """What the constructor builds for a file: its values, read without Hydra."""
    group, option = name.split("/")
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    del values["defaults"]
    if name == "mesh/auto":
        return Topology()  # one process
    if group == "mesh":
        return Topology(**values)
    if group == "cache":
        return CacheConfig(**values)
    mesh = CPMesh(Topology())
    if group == "prefill":
        return PCPPrefillAttention(**values, mesh=mesh)
    assert option.startswith("gqa")
    return DCPGQAAttention(32, 4, 2, 8, **values, layer_idx=1, mesh=mesh)


@pytest.mark.parametrize("name", SHIPPED)
def test_builds_what_the_constructor_builds(
    name: str, compose_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    group, option = name.split("/")
    built = instantiate(compose_app(f"{group}={option}")[group])
    if group in ("attention", "prefill"):
        mesh = CPMesh(Topology())
        shape = (32, 4, 2, 8) if group == "attention" else ()
        built = built(*shape, mesh=mesh, **({"layer_idx": 1} if shape else {}))
        expected = expected_of(name)
        assert type(built) is type(expected)
        # The representation of a module shows its settings, and those of its parts.
        assert repr(built) == repr(expected)
    else:
        assert built == expected_of(name)


def test_mesh_options_are_what_they_are_called(compose_app: Any) -> None:
    named = [n for n in SHIPPED if n.startswith("mesh/") and n not in ("mesh/auto", "mesh/single")]
    assert len(named) >= 8
    for name in named:
        topology = instantiate(compose_app(f"mesh={name.split('/')[1]}").mesh)
        degrees = [
            f"{axis}{topology.size(axis)}"
            for axis in ("tp", "pcp", "dcp")
            if topology.size(axis) > 1
        ]
        assert "_".join(degrees) == name.split("/")[1]
        assert topology.dcp in topology.possible_dcp()


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_auto_spreads_the_context_over_all_ranks(
    ranks: int, compose_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert instantiate(compose_app("mesh=auto").mesh) == Topology(pcp=ranks, dcp=ranks)


@pytest.mark.parametrize("path", SCHEMAS)
def test_schema_has_the_settings_of_the_constructor(path: str) -> None:
    schema = SCHEMAS[path]()
    fields = {k: v for k, v in vars(schema).items() if not k.startswith("_")}
    target = get_class(schema._target_)
    settings = {
        name: parameter.default
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.default is not inspect.Parameter.empty and name not in RUNTIME
    }
    assert len(settings) >= 2
    assert fields == settings
    assert schema._convert_ == "all"


def test_short_overrides_reach_their_groups(compose_app: Any) -> None:
    cfg = compose_app("mesh=tp3_pcp2_dcp2", "cache.interleave_size=5", "attention.combine=ag_rs")
    assert instantiate(cfg.mesh) == Topology(tp=3, pcp=2, dcp=2)
    assert instantiate(cfg.cache) == CacheConfig(interleave_size=5)
    layer = instantiate(cfg.attention)(32, 4, 2, 8, layer_idx=0, mesh=CPMesh(Topology()))
    assert layer.combine == "ag_rs"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cache.blocksize=4", ("blocksize", "CacheConf")),
        ("mesh.cp=2", ("cp", "TopologyConf")),
        ("attention.windw=3", ("windw", "GQAConf")),
        ("cache.block_size=many", ("many", "block_size")),
        ("mesh.tp=1.5", ("1.5", "mesh.tp")),
        ("attention.bias=3x", ("3x", "attention.bias")),
        ("mesh=pcp5", ("mesh/pcp5", "pcp2_dcp2", "single")),
        ("prefill=rings", ("prefill/rings", "gather_kv")),
    ],
)
def test_mistakes_are_refused(override: str, words: tuple[str, ...], compose_app: Any) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        compose_app(override)
    message = f"{caught.value}\n{caught.value.__cause__}"
    for word in words:
        assert word in message


def test_the_constructor_judges_values(compose_app: Any) -> None:
    with pytest.raises(InstantiationException) as caught:
        instantiate(compose_app("mesh.tp=0").mesh)
    assert isinstance(caught.value.__cause__, ConfigError)
    assert "tp=0" in str(caught.value)


def test_help_of_the_example_names_every_option() -> None:
    text = (EXAMPLES / "generate.yaml").read_text()
    for name in SHIPPED:
        assert name.split("/")[1] in text.replace(",", " ").split()
