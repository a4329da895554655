"""Every shipped site of a Slurm cluster: it renders a job for two nodes, names its sources, and keeps the rules that
the cluster's own manual publishes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bigsci_launch.config.load import load_run
from bigsci_launch.config.schema.site import SiteConfig
from bigsci_launch.config.site import load_site
from bigsci_launch.content import packaged
from bigsci_launch.launch.job.options import Option
from bigsci_launch.launch.job.request import JobRequest, make_request
from bigsci_launch.launch.job.script import render_script
from bigsci_launch.runs.layout import RunDir

OWN = {"local", "minicluster", "template"}
"""Files that describe no cluster of others."""
FILES = sorted(path for path in packaged("slurm", "sites").glob("*.yaml") if path.stem not in OWN)
SITES = [path.stem for path in FILES]
SOURCED = [path for path in FILES if path.stem != "jean-zay-a100-2022"]
# What a line of a site file may state without a source: text for people, and what follows from the site itself.
UNSOURCED = re.compile(r"\s*(description|scheduler|value|reason):")

RunFile = Callable[..., Path]
MakeRequest = Callable[..., JobRequest]


@pytest.fixture
def request_on(run_file: RunFile) -> MakeRequest:
    """`request_on("lumi-g", "slurm.nodes=2")` is a request of two nodes on a site."""

    def request(name: str, *overrides: str) -> JobRequest:
        site = load_site(name).config
        ranks = site.ranks_per_node
        run = run_file(
            name,
            parallelism={"tensor_parallel_size": 1},
            training={"steps": 10, "micro_batch_size": 1, "global_batch_size": 2 * ranks},
            model={
                "num_layers": 2,
                "hidden_size": 64,
                "num_attention_heads": 8,
                "sequence_length": 8,
                "vocab_size": 4096,
            },
        )
        image = ["slurm.container_image=/images/train.sqsh"] if site.container else []
        return make_request(
            load_run(run, [*image, *overrides]),
            run=RunDir(Path("/home/alice/runs/two")),
            attempt="0001",
            working_directory=Path("/home/alice/llm"),
            python="/opt/bsl/bin/python",
            local=False,
        )

    return request


def texts(options: tuple[Option, ...]) -> set[str]:
    return {option.name if option.value is None else f"{option.name}={option.value}" for option in options}


@pytest.mark.parametrize("name", SITES)
def test_a_job_for_two_nodes(name: str, request_on: MakeRequest, tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(render_script(request_on(name)))
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=300)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SOURCED, ids=lambda path: path.stem)
def test_every_fact_has_a_source_and_a_date(path: Path) -> None:
    lines = path.read_text().splitlines()
    sources = {match[1]: line for line in lines if (match := re.match(r"# \[(\d)\] ", line))}
    assert sources and any("read 2026-11" in line for line in sources.values())
    assert "Not run " in path.read_text()
    for line in lines:
        fact, _, remark = line.partition(" #")
        is_fact = re.match(r"\s*(- |[\w.]+: *\S)", fact) and not line.startswith("#") and not UNSOURCED.match(fact)
        if is_fact:
            cited = re.findall(r"\[(\d)\]", remark)
            assert cited or "not confirmed" in remark, f"{path.name}: no source: {line}"
            assert set(cited) <= sources.keys(), line


@pytest.mark.parametrize("name", [name for name in SITES if name != "jean-zay-a100-2022"])
def test_no_site_has_what_belongs_to_one_project(name: str) -> None:
    """An account, a reservation, or the workaround of one training would reach everybody's jobs."""
    site = load_site(name).config
    assert site.account is None and site.reservation is None
    assert "CUDA_LAUNCH_BLOCKING" not in site.environment


def test_lumi_keeps_its_low_noise_mode(request_on: MakeRequest) -> None:
    """https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/distribution-binding/: the first core of each group of
    8 is not for jobs, and rank n runs on the cores next to GCD n."""
    site, request = load_site("lumi-g").config, request_on("lumi-g")
    assert site.cpu_bind is not None
    kind, _, listed = site.cpu_bind.partition(":")
    masks = [int(mask, 16) for mask in listed.split(",")]
    assert (kind, len(masks), site.ranks_per_node, site.cpus_per_rank) == ("mask_cpu", 8, 8, 7)
    assert all(mask.bit_count() == site.cpus_per_rank for mask in masks)
    reserved = sum(1 << core for core in range(0, 64, 8))
    assert all(mask & reserved == 0 for mask in masks)
    assert sum(masks) == (1 << 64) - 1 - reserved, "no core belongs to two ranks"
    first_cores = [(mask & -mask).bit_length() - 1 for mask in masks]
    assert first_cores == [49, 57, 17, 25, 1, 9, 33, 41], "the manual's order of ranks"
    assert {"gpus-per-node=8"} <= texts(request.options)
    assert {f"cpu-bind={site.cpu_bind}", "cpus-per-task=7"} <= texts(request.step_options)


def test_lumi_runs_singularity_without_the_driver_option(request_on: MakeRequest) -> None:
    """The command is `singularity`, and no `--nv` is for AMD. A run without an image has no container."""
    prefix = request_on("lumi-g").step_prefix
    assert prefix[:2] == ("singularity", "exec") and "/images/train.sqsh" in prefix
    assert not {"--nv", "--rocm"} & set(prefix)
    assert {"--bind=/scratch", "--bind=/pfs"} <= set(prefix)
    assert request_on("lumi-g", "slurm.container_image=null").step_prefix == ()


@pytest.mark.parametrize(("name", "address"), [("juwels-booster", '*}"i'), ("jupiter", '*}"')])
def test_jsc_reaches_the_first_node_over_infiniband(name: str, address: str, request_on: MakeRequest) -> None:
    """FZJ-JSC/jubench-megatron-lm: JUWELS' nodes have another name there. JUPITER's have not."""
    script = render_script(request_on(name))
    line = next(line for line in script.splitlines() if line.startswith("export MASTER_ADDR="))
    assert line.endswith(address)


@pytest.mark.parametrize(
    ("name", "kind", "cores", "gpus"), [("jean-zay-a100", "a100", 64, 8), ("jean-zay-h100", "h100", 96, 4)]
)
def test_jean_zay_names_the_kind_of_node_three_times(
    name: str, kind: str, cores: int, gpus: int, request_on: MakeRequest
) -> None:
    """The constraint, the module and the QOS name it. Without hyper-threads a rank gets its share of cores, no more."""
    site, request = load_site(name).config, request_on(name)
    given = texts(request.options)
    assert {f"constraint={kind}", "hint=nomultithread", f"gres=gpu:{gpus}"} <= given
    assert f"qos=qos_gpu_{kind}-t3" in given
    assert request.activation[:2] == ("module purge", f"module load arch/{kind}"), "before any other module"
    assert site.cpus_per_rank == cores // gpus
    assert site.default_time_limit == "20:00:00"


def test_marenostrum_gives_twenty_cores_to_a_gpu(request_on: MakeRequest) -> None:
    given = texts(request_on("marenostrum5-acc").options)
    assert {"cpus-per-task=20", "gres=gpu:4", "partition=acc", "exclusive"} <= given
    assert any(option.startswith("qos=acc_") for option in given)


def test_leonardo_takes_whole_nodes(request_on: MakeRequest) -> None:
    assert {"exclusive", "mem=0", "gres=gpu:4", "cpus-per-task=8"} <= texts(request_on("leonardo-booster").options)


@pytest.mark.parametrize("name", ["alps-clariden", "jupiter"])
def test_a_grace_hopper_node_has_a_rank_for_each_superchip(name: str) -> None:
    """Ranks take the device of their LOCAL_RANK, so none of them may see its own GPU only."""
    site = load_site(name).config
    assert (site.ranks_per_node, site.cpus_per_rank) == (4, 72)
    assert not any("gpus-per-task" in option for option in (*site.sbatch_options, *site.srun_options))


def test_a_superpod_mounts_what_the_run_needs(request_on: MakeRequest) -> None:
    options = {
        option.name: option.value for option in request_on("superpod-pyxis", "data.prefix=/data/c/text").step_options
    }
    assert options["container-image"] == "/images/train.sqsh"
    assert options["container-workdir"] == "/home/alice/llm"
    mounts = "/data/c:/data/c,/home/alice/llm:/home/alice/llm,/home/alice/runs/two:/home/alice/runs/two"
    assert options["container-mounts"] == mounts
    assert "no-container-mount-home" in options
    assert {"MASTER_ADDR", "PYTHONUNBUFFERED"} <= set((options["container-env"] or "").split(","))


@pytest.mark.parametrize(
    ("tp", "more", "segment"), [(4, (), None), (8, (), "2"), (8, ('slurm.sbatch_options=["--segment=16"]',), "16")]
)
def test_a_tensor_parallel_group_stays_in_one_rack(
    tp: int, more: tuple[str, ...], segment: str | None, request_on: MakeRequest
) -> None:
    request = request_on("gb200-nvl72", f"parallelism.tensor_parallel_size={tp}", *more)
    assert [option.value for option in request.options if option.name == "segment"] == ([segment] if segment else [])


def test_bloom_keeps_its_own_workaround() -> None:
    run = load_run(packaged("configs", "bloom-176b.yaml"))
    assert run.site.name == "jean-zay-a100-2022"
    assert isinstance(run.site.config, SiteConfig)
    assert run.origins["env.CUDA_LAUNCH_BLOCKING.value"].startswith(str(run.path))
