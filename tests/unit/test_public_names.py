"""Public names are pinned and documented, and the rules that no linter knows are kept."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import cplayers

PACKAGE = Path(cplayers.__file__).parent
MAX_LINES, MAX_KERNEL_LINES = 300, 400

PUBLIC = {
    "cplayers": """
        CPLayersError CPMesh CacheConfig CacheFullError ConfigError DCPGQAAttention
        DCPMLAAttention GQASpec InterleavedLayout MLASpec PCPPrefillAttention PagedKVCache
        RankFailedError StateError TPAQProj Topology TransferError ZigzagLayout
    """,
    "cplayers.mesh": """
        AXES CPMesh Coords Ring Topology TrafficLog TrafficRecord exchange gather_bytes
        legal_dcp meshes_over regroup validate world_size
    """,
    "cplayers.ops": """
        PagedKeys Partial Spans Tile add_sink apply_rope attend attend_paged attention_reference
        available_backends empty merge merge_stacked merge_stream require_backend scale_weights
        select select_paged spans tile_rows weigh yarn_mscale
    """,
    "cplayers.cache": """
        BlockPool BlockShard CacheConfig CacheSpec GQASpec Holding InterleavedLayout Landing
        Layout MLASpec Move PagedKVCache Plane PoolStats ShardHeader StaticDecode StepPlan
        ZigzagLayout bytes_per_token load_shard moves save_shard
    """,
    "cplayers.attention": """
        CachedLayer Combine DCPGQAAttention DCPMLAAttention Decode GatheredLinear HeadShard
        PCPPrefillAttention RowParallelLinear Scoring Sizes TPAQProj Visit attend_cached
        attend_context attend_new combine combine_bytes gather_rows head_shard send_queries
        start_combine take_rows visit
    """,
    "cplayers.hf": "CPCache CPState ContextParallelModel parallelize serving_step",
    "cplayers.cli": "",
    "cplayers.conf": """
        CacheConf GQAConf MLAConf PrefillConf ServingConf TopologyConf register_configs
    """,
    "cplayers.serving": """
        Fleet Passage Progress Replicas Request Scheduler ServedModel Server ServingConfig hand_over
        read_trace write_trace
    """,
    "cplayers.testing": "BackendError RankPool RankPoolError check_backend",
    "cplayers.planning": """
        Advice Assumed Budget Calibration Call Candidate Choices Crossovers Hardware KVMemory Link
        Load ModelShape Seconds Speeds TimeModel Weights advise budget_of cache_spec calibrate
        candidates check_layout crossovers hardware_presets layouts model_presets sizes_of
        weights_of
    """,
    "cplayers.viz": "placement_svg",
}
# tuples and Literals, which cannot carry a docstring
PLAIN_VALUES = {"AXES", "Combine", "Decode", "Replicas"}
ROOMS = sorted(f"cplayers.{m.name}" for m in pkgutil.iter_modules([str(PACKAGE)]) if m.ispkg)


@pytest.fixture(autouse=True)
def compiler_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets this variable when transformers imports its compiler; undone afterwards."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def modules() -> Iterator[Any]:
    yield cplayers
    for info in pkgutil.walk_packages([str(PACKAGE)], "cplayers."):
        yield importlib.import_module(info.name)


def sources() -> Iterator[tuple[str, Path]]:
    """Each file of the package, with its room."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        yield (parts[0] if len(parts) > 1 else ""), path


def test_every_room_is_pinned() -> None:
    assert {"cplayers", *ROOMS} == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(PUBLIC[name].split())
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert hasattr(module, public)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    for public in set(module.__all__) - PLAIN_VALUES:
        value = getattr(module, public)
        # A class does not pass with its base's docstring, nor a dataclass with its signature.
        doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        assert doc and not doc.startswith(f"{public}("), f"{name}.{public}"


def documented(doc: str, section: str) -> list[str] | None:
    """Names in a section of a Google docstring, or None where there is none."""
    lines = inspect.cleandoc(doc).splitlines()
    if f"{section}:" not in lines:
        return None
    start = lines.index(f"{section}:") + 1
    body = indented(lines[start:])
    return [m[1] for line in body if (m := re.match(r"    \*{0,2}(\w+)(?: \([^)]*\))?:", line))]


def indented(lines: list[str]) -> list[str]:
    end = next((i for i, line in enumerate(lines) if line and line[0] != " "), len(lines))
    return lines[:end]


def with_arguments() -> Iterator[tuple[str, str, list[str]]]:
    """Name, docstring and parameters of all functions, methods and classes of the package."""
    for module in modules():
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            where = f"{module.__name__}.{name}"
            if inspect.isclass(value):
                if "__doc__" in vars(value) and value.__doc__ and "Args:" in value.__doc__:
                    yield where, value.__doc__, parameters_of(value)
                for member, raw in vars(value).items():
                    function = getattr(raw, "__func__", raw)
                    if inspect.isfunction(function) and function.__doc__:
                        yield f"{where}.{member}", function.__doc__, parameters_of(function)[1:]
            elif inspect.isfunction(value) and value.__doc__:
                yield where, value.__doc__, parameters_of(value)


def parameters_of(value: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(value).parameters)


def test_whoever_documents_arguments_documents_all_of_them() -> None:
    checked = 0
    for where, doc, parameters in with_arguments():
        names = documented(doc, "Args")
        if names is not None:
            assert names == parameters, where
            checked += 1
    assert checked > 50


def test_the_reader_of_docstrings_reads() -> None:
    doc = """Do it.

    Args:
        a: One, e.g.
            b: not a name.
        **kwargs: More.

    Returns:
        c: Nor this.
    """
    assert documented(doc, "Args") == ["a", "kwargs"]
    assert documented("Do it.", "Args") is None


def test_no_file_is_long() -> None:
    checked = 0
    for _, path in sources():
        limit = MAX_KERNEL_LINES if "kernels" in path.parts else MAX_LINES
        assert len(path.read_text().splitlines()) <= limit, path.name
        checked += 1
    assert checked > 50


def attributes_of(path: Path) -> set[str]:
    """Attributes and imported names in a file: what it could call."""
    tree = ast.parse(path.read_text())
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found


def rooms_that_use(names: set[str]) -> set[str]:
    return {room for room, path in sources() if names & attributes_of(path)}


def test_only_cli_and_testing_read_environment_variables() -> None:
    assert rooms_that_use({"environ", "environb", "getenv", "getenvb"}) <= {"cli", "testing"}


def test_only_one_setting_reads_an_environment_variable() -> None:
    """What torchrun sets is read where the user chooses mesh=auto, and nowhere else."""
    read = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.yaml")
        if "oc.env" in str(yaml.safe_load(path.read_text()))
    }
    assert read == {"conf/mesh/auto.yaml"}


def test_only_mesh_and_testing_ask_for_ranks() -> None:
    users = rooms_that_use({"get_rank", "get_world_size", "barrier", "monitored_barrier"})
    assert users == {"mesh"}
    assert "mesh" in rooms_that_use({"all_to_all_single"})
