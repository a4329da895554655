"""Sites: where they are found, what is refused, and how a run is placed on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bigsci_launch.config.load import LoadedRun
from bigsci_launch.config.site import Layout, find_sites, list_sites, load_site
from bigsci_launch.errors import ConfigError
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts

Load = Callable[..., LoadedRun]


def test_the_folder_beside_the_run_file_comes_first(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near = run_file.parent
    mine, own = near / "sites" / "local.yaml", near / "mine"
    (own / "sites").mkdir(parents=True)
    text = (near / "sites" / "lake.yaml").read_text()
    (own / "sites" / "pond.yaml").write_text(text)
    (own / "sites" / "local.yaml").write_text(text)
    monkeypatch.setenv("BSL_PATH", f"/nowhere::{own}")
    assert load_site("pond").path == own / "sites" / "pond.yaml"
    assert load_site("local").path == own / "sites" / "local.yaml"
    mine.write_text(text)
    assert load_site("local", near).path == mine
    assert set(find_sites(near)) - set(find_sites()) == {"lake"}
    assert {"local", "pond"} <= set(find_sites(near))


def test_our_own_sites_are_listed_without_the_template() -> None:
    names = [site.name for site in list_sites()]
    assert names == sorted(names)
    assert {"jean-zay-a100", "local", "lumi-g", "minicluster"} <= set(names)
    assert "template" not in names


def test_an_unknown_site_names_those_that_are_known_and_where_was_looked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_site("minicluste", tmp_path)
    text = caught.value.message
    assert has_parts(text, "'minicluste'", "minicluster?", "alps-clariden, ", "local, lumi-g, ")
    assert has_parts(text, tmp_path / "sites", "assets/slurm/sites")
    for name in ("template", "", "../local", "local.yml", "local/"):
        with pytest.raises(ConfigError):
            load_site(name, tmp_path)


WRONG_VALUES = [
    ("ranks_per_node: 2", "ranks_per_node: two", "3:1", "ranks_per_node"),
    ("scheduler: slurm", "scheduler: pbs", "2:1", "scheduler"),
    ("default_partition: long", "default_partition: lang", "17:1", "default_partition"),
    ("max_time: 01:00:00", "max_time: 60", "13:5", "partitions.short.max_time"),
    ("nodes: 10", "node: 10", "12:5", "partitions.short.node"),
    ("  short:", '  "sho rt":', "11:3", "partitions.sho rt"),
    ("gres: gpu:2", "sbatch_options: [--output=x]", "5:1", "sbatch_options"),
    ("gres: gpu:2", "sbatch_options: [--mem=1, --mem 2]", "5:1", "sbatch_options"),
    ("gres: gpu:2", "sbatch_options: [-p x]", "5:18", "sbatch_options.0"),
    ("gres: gpu:2", 'sbatch_options: ["--mem=1\\n#SBATCH -x"]', "5:18", "sbatch_options.0"),
    ("gres: gpu:2", "srun_options: [--mpi=pmix]", "5:1", "srun_options"),
    ("gres: gpu:2", "srun_options: [--gpu-bind none]", "5:16", "srun_options.0"),
    ("gres: gpu:2", "stage_in: [{file: /a, to: b}]", "5:23", "stage_in.0.to"),
    ("gres: gpu:2", "ulimits: {core: none}", "5:11", "ulimits.core"),
    ("gres: gpu:2", "gres: gpu:2 --exclusive", "5:1", "gres"),
    ("memory_gib: 79.15", "memory_gib: 0", "8:3", "gpu.memory_gib"),
    ('    value: "1"', "    value: 1", "23:5", "environment.CUDA_LAUNCH_BLOCKING.value"),
    ("    reason: it hangs without\n", "", "22:3", "environment.CUDA_LAUNCH_BLOCKING.reason"),
    ("account: six@a100", "acount: six@a100", "20:1", "acount"),
    ("account: six@a100", "container: {kind: docker, image: x}", "20:13", "container.kind"),
    ("account: six@a100", "container: {kind: pyxis, command: x}", "20:1", "container"),
    ("account: six@a100", "container: {kind: pyxis, options: [--container-workdir=/x]}", "20:26", "container.options"),
]


def test_what_is_wrong_in_a_site_file_has_its_place(run_file: Path, check_golden: Callable[[Path, str], None]) -> None:
    path = run_file.parent / "sites" / "lake.yaml"
    text, said = path.read_text(), ""
    for old, new, place, key in WRONG_VALUES:
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        with pytest.raises(ConfigError) as caught:
            load_site("lake", run_file.parent)
        (found,) = caught.value.problems
        assert (found.where, found.key) == (f"{path}:{place}", key)
        said += f"{key}: {found.text}\n"
    check_golden(Path(__file__).parents[2] / "golden" / "reports" / "wrong-site-files.txt", said)


def test_on_slurm_the_nodes_decide(load: Load) -> None:
    assert load().layout == Layout(4, 2, Topology(tp=2, pp=2, dp=2))
    with pytest.raises(ConfigError):
        load("parallelism.data_parallel_size=4")


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((2, 2, 2), Topology(tp=2, pp=2, dp=2)),
        ((1, 1, 1), Topology(tp=1, pp=1, dp=1)),
        ((1, 3, 1), Topology(tp=1, pp=3, dp=1)),
        ((4, 4, 4), Topology(tp=4, pp=4, dp=4)),
        ((2, 2, "null"), Topology(tp=2, pp=2, dp=2)),
        ((1, 1, "null"), Topology(tp=1, pp=1, dp=8)),
    ],
)
def test_on_a_local_site_the_topology_decides(load: Load, axes: tuple[int, int, object], expected: Topology) -> None:
    sizes = [
        f"parallelism.{axis}_parallel_size={size}"
        for axis, size in zip(("tensor", "pipeline", "data"), axes, strict=True)
    ]
    run = load("slurm.site=local", "slurm.nodes=1", "slurm.time_limit=null", "training.global_batch_size=16", *sizes)
    assert run.layout == Layout(1, expected.world_size, expected)
    assert run.config.parallelism.data_parallel_size == expected.dp
    assert run.warnings == ()


def test_a_local_topology_that_does_not_fill_the_machine(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load("slurm.site=local", "parallelism.pipeline_parallel_size=3")
    assert has_parts(caught.value.problems[0].text, "8 local ranks", "tp 2 x pp 3")
