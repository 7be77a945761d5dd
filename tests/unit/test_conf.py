"""The Hydra configuration: what is shipped composes, builds, and agrees with the constructors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import get_class, instantiate

import cplayers.conf
from cplayers.attention import DCPGQAAttention, DCPMLAAttention, PCPPrefillAttention
from cplayers.cache import CacheConfig
from cplayers.conf import register_configs
from cplayers.conf.schema import RUNTIME, SCHEMAS
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh, Topology
from cplayers.serving import ServingConfig

CONF = Path(cplayers.conf.__file__).parent
EXAMPLES = Path(__file__).parents[2] / "examples"
SHIPPED = sorted(str(path.relative_to(CONF).with_suffix("")) for path in CONF.rglob("*.yaml"))
SHAPES: dict[str, tuple[int | None, ...]] = {"gqa": (32, 4, 2, 8), "mla": (32, 4, None, 6, 5, 4, 3)}
"""Of a small layer, by the first word of an attention option."""
APP = """
defaults:
  - mesh: single
  - cache: default
  - attention: gqa
  - prefill: auto
  - serving: dynamic
  - _self_
serving: {num_blocks: 8}
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
    groups = {"mesh", "cache", "attention", "prefill", "serving"}
    assert {name.split("/")[0] for name in SHIPPED} == groups
    assert {"mesh/single", "mesh/pcp2_dcp2", "mesh/tp3_pcp2_dcp2", "mesh/tp9_dcp3"} <= set(SHIPPED)
    assert {"attention/gqa", "attention/mla", "attention/mla_tpa"} <= set(SHIPPED)


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
    if group == "serving":
        return ServingConfig(num_blocks=8, **values)
    mesh = CPMesh(Topology())
    if group == "prefill":
        return PCPPrefillAttention(**values, mesh=mesh)
    kind = option.partition("_")[0]
    layer: Any = {"gqa": DCPGQAAttention, "mla": DCPMLAAttention}[kind]
    return layer(*SHAPES[kind], **values, layer_idx=1, mesh=mesh)


def plain_values(module: Any) -> dict[str, Any]:
    """The settings that a module keeps, also those that its representation does not show."""
    kinds = (int, float, str, bool, type(None))
    return {name: value for name, value in vars(module).items() if isinstance(value, kinds)}


@pytest.mark.parametrize("name", SHIPPED)
def test_builds_what_the_constructor_builds(
    name: str, compose_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    group, option = name.split("/")
    built = instantiate(compose_app(f"{group}={option}")[group])
    if group in ("attention", "prefill"):
        mesh = CPMesh(Topology())
        shape = SHAPES[option.partition("_")[0]] if group == "attention" else ()
        built = built(*shape, mesh=mesh, **({"layer_idx": 1} if shape else {}))
        expected = expected_of(name)
        assert type(built) is type(expected)
        # The representation of a module shows its settings, and those of its parts.
        assert repr(built) == repr(expected)
        assert plain_values(built) == plain_values(expected)
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
    given = {k: v for k, v in vars(schema).items() if not k.startswith("_")}
    target = get_class(schema._target_)
    settings = {
        name: parameter.default
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.default is not inspect.Parameter.empty and name not in RUNTIME
    }
    for each in fields(target) if is_dataclass(target) else ():
        if each.default_factory is not MISSING:
            settings[each.name] = each.default_factory()
        elif each.default is MISSING:
            settings = {each.name: "???", **settings}  # Hydra asks the user for it
    assert len(settings) >= 2
    assert given == settings
    assert list(given) == list(settings), "in the same order"
    assert schema._convert_ == "all"
    asked = get_type_hints(target.__init__)
    for name, hint in get_type_hints(SCHEMAS[path]).items():
        if name in given:
            assert hint == without_literals(asked[name]), name


def without_literals(hint: Any) -> Any:
    """A constructor's type as a schema has it: Hydra has no Literal, no Mapping and few unions."""
    if get_origin(hint) is Literal:
        [kind] = {type(value) for value in get_args(hint)}
        return kind
    if get_origin(hint) is Mapping:
        return dict[get_args(hint)]
    return Any if Mapping in map(get_origin, get_args(hint)) else hint


def test_short_overrides_reach_their_groups(compose_app: Any) -> None:
    cfg = compose_app("mesh=tp3_pcp2_dcp2", "cache.interleave_size=5", "attention.combine=ag_rs")
    assert instantiate(cfg.mesh) == Topology(tp=3, pcp=2, dcp=2)
    assert instantiate(cfg.cache) == CacheConfig(interleave_size=5)
    layer = instantiate(cfg.attention)(32, 4, 2, 8, layer_idx=0, mesh=CPMesh(Topology()))
    assert layer.combine == "ag_rs"


def test_settings_of_serving_are_mappings_and_lists(compose_app: Any) -> None:
    cfg = compose_app(
        "serving.num_blocks=64", "+serving.crossovers={2:400,4:null}", "serving.steps={1:8,4:1}"
    )
    config = instantiate(cfg.serving)
    assert config == ServingConfig(64, crossovers={2: 400, 4: None}, steps={1: 8, 4: 1})
    assert [config.steps_of(size) for size in (1, 4)] == [8, 1]
    fixed = instantiate(compose_app("serving=fixed", "serving.sizes=[4]").serving)
    assert fixed == ServingConfig(8, sizes=(4,))


def test_settings_of_mla_reach_the_layer_and_its_core(compose_app: Any) -> None:
    cfg = compose_app(
        "attention=mla",
        "attention.decode=auto",
        "attention.yarn_factor=40",
        "attention.yarn_mscale_all_dim=1",
        "attention.rope_interleave=false",
        "prefill.workspace_tokens=96",
    )
    mesh = CPMesh(Topology())
    core = instantiate(cfg.prefill)(mesh=mesh)
    layer = instantiate(cfg.attention)(*SHAPES["mla"], layer_idx=0, prefill=core, mesh=mesh)
    assert isinstance(layer, DCPMLAAttention)
    assert (layer.decode, layer.rope_interleave) == ("auto", False)
    assert layer.scoring.scale == pytest.approx(
        (5 + 4) ** -0.5 * 1.3688879454113936**2
    )  # 0.1 ln 40 + 1
    assert layer.prefill is core and core.workspace_tokens == 96
    own = instantiate(compose_app("attention=mla_tpa").attention)
    assert own(*SHAPES["mla"], layer_idx=0, mesh=mesh).decode == "replicate_q"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cache.blocksize=4", ("blocksize", "CacheConf")),
        ("mesh.cp=2", ("cp", "TopologyConf")),
        ("serving.crossover={2:9}", ("crossover", "ServingConf")),
        ("+serving.crossovers={2:many}", ("many", "crossovers")),
        ("attention.windw=3", ("windw", "GQAConf")),
        ("attention=mla attention.q_proj=tpa", ("q_proj", "MLAConf")),
        ("prefill.workspace=9", ("workspace", "PrefillConf")),
        ("prefill.workspace_tokens=all", ("all", "workspace_tokens")),
        ("cache.block_size=many", ("many", "block_size")),
        ("mesh.tp=1.5", ("1.5", "mesh.tp")),
        ("attention.bias=3x", ("3x", "attention.bias")),
        ("mesh=pcp5", ("mesh/pcp5", "pcp2_dcp2", "single")),
        ("prefill=rings", ("prefill/rings", "gather_kv")),
    ],
)
def test_mistakes_are_refused(override: str, words: tuple[str, ...], compose_app: Any) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        compose_app(*override.split())
    message = f"{caught.value}\n{caught.value.__cause__}"
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("group", "override", "words"),
    [
        ("mesh", "mesh.tp=0", "tp=0"),
        ("prefill", "prefill.workspace_tokens=0", "workspace_tokens=0"),
        ("attention", "attention.decode=gather_k", "decode='gather_k'"),
    ],
)
def test_the_constructor_judges_values(
    group: str, override: str, words: str, compose_app: Any
) -> None:
    built: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "mesh": ((), {}),
        "prefill": ((), {"mesh": CPMesh(Topology())}),
        "attention": (SHAPES["mla"], {"mesh": CPMesh(Topology()), "layer_idx": 0}),
    }
    args, runtime = built[group]
    with pytest.raises((InstantiationException, ConfigError)) as caught:
        instantiate(compose_app("attention=mla", override)[group])(*args, **runtime)
    error = caught.value
    if isinstance(error, InstantiationException):  # not a factory: Hydra makes it, and wraps
        assert isinstance(error.__cause__, ConfigError)
    assert words in str(error)


def test_help_of_the_example_names_every_option() -> None:
    """Its model has grouped-query attention: the other options cannot be chosen there."""
    text = (EXAMPLES / "generate.yaml").read_text()
    named = text.replace(",", " ").split()
    for name in SHIPPED:
        used = not name.startswith(("attention/mla", "serving/"))
        assert (name.split("/")[1] in named) == used, name
