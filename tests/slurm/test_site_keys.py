"""Keys of sites on a real Slurm: what sbatch, srun, sbcast and the ranks make of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.layout import AttemptDir, RunDir
from tests.support.command import run_bsl
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

from .conftest import SlurmCluster

pytestmark = pytest.mark.slurm
PROBE = Path(__file__).parent / "programs" / "site_probe.py"
MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}
CONTAINER_COMMAND = shutil.which("apptainer") or shutil.which("singularity")


class Sites:
    """A folder in which a test writes a site and submits runs of two nodes for it."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.stderr = ""

    def bsl(self, *argv: str, rc: int = 0) -> str:
        done = run_bsl(self.folder, *argv, rc=rc, environment=self.cluster.environment())
        self.stderr = done.stderr
        return done.stdout.strip()

    def write(self, name: str, *words: str, site: dict[str, Any], slurm: dict[str, Any], **run: Any) -> Path:
        """Write a site `here` and a run of two nodes and two ranks that starts the probe with `words`."""
        facts = {"description": "here", "scheduler": "slurm", "ranks_per_node": 1, **site}
        config = {
            "run": {"name": name, "command": [*COMMAND, *words], **run},
            "slurm": {"site": f"{name}-site.yaml", "nodes": 2, "time_limit": "00:05:00", **slurm},
            "model": {**MODEL, "vocab_size_multiple": 32},
            "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 2},
            "data": {"prefix": "none"},
            "monitor": {"exit_margin_s": 30, "step_time_s": 1, "save_time_s": 1},
        }
        (self.folder / f"{name}-site.yaml").write_text(json.dumps(facts))
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(config))
        return path

    def start(
        self, name: str, *words: str, rc: int = 0, wait: bool = True, site: Any = None, slurm: Any = None, **run: Any
    ) -> AttemptDir:
        """Submit such a run, wait for its end, and return its attempt."""
        path = self.write(name, *words, site=site or {}, slurm=slurm or {}, **run)
        self.bsl("submit", str(path), *(["--wait"] if wait else []), rc=rc)
        return RunDir(self.folder / "runs" / name).attempt("0001")

    def job_facts(self, attempt: AttemptDir) -> dict[str, str]:
        """Return what `scontrol show job` says, by name."""
        job_id = json.loads((attempt.path / "job.json").read_text())["job_id"]
        text = self.cluster.run("scontrol", "--oneliner", "show", "job", job_id).stdout
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)


COMMAND = [sys.executable, "-S", str(PROBE)]


def report(attempt: AttemptDir, rank: int) -> dict[str, Any]:
    lines = log(attempt, rank).splitlines()
    found: dict[str, Any] = json.loads(next(line.partition(" report ")[2] for line in lines if " report " in line))
    return found


def log(attempt: AttemptDir, rank: int) -> str:
    path = attempt.path / "logs" / f"rank-{rank:04d}.log"
    return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def sites(isolated_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Sites:
    return Sites(isolated_cluster, tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="module")
def prepared(sites: Sites) -> AttemptDir:
    """A run on a site with everything that one job can show."""
    return sites.start(
        "prepared",
        site={
            "cpu_bind": "mask_cpu:0x1",
            "srun_options": ["--slurmd-debug=error", "--task-prolog=" + str(prolog(sites.folder))],
            "ulimits": {"core": 0, "nofile": 512},
            "master_addr_suffix": "i",
        },
        slurm={"ulimits": {"nofile": 300}},
    )


def prolog(folder: Path) -> Path:
    """A task prolog: srun runs it before each rank, and takes variables from what it prints."""
    path = folder / "prolog.sh"
    path.write_text("#!/bin/sh\necho export GREETING=hello\n")
    path.chmod(0o755)
    return path


def test_an_srun_option_of_the_site_reaches_the_ranks(prepared: AttemptDir) -> None:
    assert [report(prepared, rank)["environment"]["GREETING"] for rank in (0, 1)] == ["hello", "hello"]


def test_the_cpu_mask_of_the_site_is_that_of_the_step(prepared: AttemptDir) -> None:
    """Slurm tells each rank how it is bound. The mini cluster's nodes share two cores, so none is really bound."""
    environment = report(prepared, 1)["environment"]
    assert environment["SLURM_CPU_BIND_TYPE"] == "mask_cpu:"
    assert int(environment["SLURM_CPU_BIND_LIST"], 16) == 1, "as 1 or 0x1"


def test_limits_reach_the_ranks_of_every_node(prepared: AttemptDir) -> None:
    assert [report(prepared, rank)["limits"] for rank in (0, 1)] == [{"core": 0, "nofile": 300}] * 2


def test_the_first_node_is_called_by_its_other_name(prepared: AttemptDir) -> None:
    assert report(prepared, 1)["environment"]["MASTER_ADDR"] == f"{report(prepared, 0)['node']}i"


def test_a_limit_that_the_node_refuses_ends_the_job_with_the_reason(sites: Sites) -> None:
    attempt = sites.start("refused", rc=1, slurm={"ulimits": {"nofile": 2**40}})
    ended = json.loads((attempt.path / "exit.json").read_text())
    assert (ended["reason"], ended["exit_code"]) == ("launch_failed", 1)
    assert has_parts(ended["cause"], "ulimits.nofile", 2**40)


@pytest.fixture(scope="module")
def local_disks(sites: Sites) -> Iterator[Path]:
    """A folder that is a disk of its own on each node: tmpfs of 64 KiB on n1, larger on n0."""
    disk = sites.folder / "disk"
    disk.mkdir()
    for node, size in (("n0", "8m"), ("n1", "64k")):
        mount = f"mount -t tmpfs -o size={size} tmpfs {disk}"
        done = sites.cluster.run("srun", "-w", node, "-N1", "-n1", "sh", "-c", mount)
        if done.returncode != 0:
            pytest.skip(f"no disk of its own for a node: {done.stderr}")
    yield disk
    sites.cluster.run("srun", "-w", "n[0-1]", "-N2", "-n2", "umount", str(disk))


def test_a_file_is_staged_to_the_disk_of_every_node(sites: Sites, local_disks: Path) -> None:
    (sites.folder / "small.txt").write_text("the shared disk")
    copy = str(local_disks / "small-%j.txt")
    attempt = sites.start("staged", copy, slurm={"nodelist": "n[0-1]", "stage_in": [{"file": "small.txt", "to": copy}]})
    for rank in (0, 1):
        assert list(report(attempt, rank)["files"].values()) == ["the shared disk"]
    assert list(local_disks.iterdir()) == [], "nothing was written to the disk that all share"


def test_a_node_whose_disk_is_full_is_named_and_no_rank_starts(sites: Sites, local_disks: Path) -> None:
    (sites.folder / "large.bin").write_bytes(b"x" * 1_000_000)
    items = [{"file": "large.bin", "to": str(local_disks / "large.bin")}]
    attempt = sites.start("full", rc=1, slurm={"nodelist": "n[0-1]", "stage_in": items})
    ended = json.loads((attempt.path / "exit.json").read_text())
    assert ended["reason"] == "launch_failed"
    assert has_parts(ended["cause"], "(n1)", "large.bin"), "sbcast does not say why, but where"
    assert "(n0)" not in ended["cause"]
    assert not any((attempt.path / "pids").glob("*"))
    assert ended["cause"] in sites.bsl("status", str(attempt.path.parents[1]))


def test_a_file_that_is_not_there_is_said_at_once(sites: Sites) -> None:
    items = [{"file": "missing.bin", "to": "/tmp/missing.bin"}]
    attempt = sites.start("missing", rc=1, slurm={"stage_in": items})
    assert "slurm.stage_in: missing.bin: " in sites.stderr
    assert "missing.bin" in json.loads((attempt.path / "exit.json").read_text())["cause"]


@pytest.mark.parametrize("stop", [pytest.param("TERM", marks=pytest.mark.long), "USR1"])
def test_a_program_is_asked_to_stop_with_the_signal_that_it_knows(sites: Sites, stop: str) -> None:
    attempt = sites.start(f"stop-{stop}", "wait", wait=False, stop_signal=stop)
    wait_until(lambda: all(" report " in log(attempt, rank) for rank in (0, 1)))
    job_id = json.loads((attempt.path / "job.json").read_text())["job_id"]
    # As Slurm does when the time limit is near: the batch script alone gets USR2.
    sites.cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    wait_until(lambda: (attempt.path / "exit.json").exists())
    assert [f"asked by SIG{stop}" in log(attempt, rank) for rank in (0, 1)] == [True, True]
    ended = json.loads((attempt.path / "exit.json").read_text())
    assert (ended["reason"], ended["exit_code"]) == ("stopped", 0)


def test_options_of_the_run_reach_slurm_and_replace_those_of_the_site(sites: Sites) -> None:
    options = ["--begin=now+3hours", "--mail-type=END,FAIL", "--mail-user=alice@example.org", "--nice=7"]
    attempt = sites.start(
        "later",
        wait=False,
        site={"sbatch_options": ["--nice=3", "--wckey=all", "--exclusive"]},
        slurm={"sbatch_options": options},
    )
    facts = sites.job_facts(attempt)
    sites.bsl("cancel", str(attempt.path.parents[1]))
    assert (facts["JobState"], facts["Reason"]) == ("PENDING", "BeginTime")
    assert (facts["MailType"], facts["MailUser"]) == ("END,FAIL", "alice@example.org")
    assert facts["Nice"] == "7"
    assert facts["OverSubscribe"] == "NO", "--exclusive of the site stays"


def test_a_licence_that_the_cluster_does_not_have_is_refused_and_leaves_nothing(sites: Sites) -> None:
    path = sites.write("licence", site={}, slurm={"sbatch_options": ["--licenses=matlab:2"]})
    sites.bsl("submit", str(path), rc=3)
    assert "license" in sites.stderr.lower()
    assert not (sites.folder / "runs" / "licence").exists()


# Stands for apptainer where that is not installed: notes its words, and runs the program where it is told to.
STAND_IN = """\
#!/bin/sh
printf '%s\\n' "$@" > "$(dirname "$0")/words-$SLURM_PROCID"
while [ "$1" != /images/none.sif ]; do
  case "$1" in --pwd=*) cd "${1#--pwd=}" ;; esac
  shift
done
shift
IN_CONTAINER=stand-in exec "$@"
"""


def test_a_container_command_of_the_site_starts_the_ranks(sites: Sites) -> None:
    """With a stand-in for singularity that notes its words."""
    command = sites.folder / "singularity"
    command.write_text(STAND_IN)
    command.chmod(0o755)
    container = {"kind": "apptainer", "command": str(command), "options": ["--rocm"], "mount_home": False}
    gpu = {"name": "MI250X", "vendor": "amd", "memory_gib": 60, "peak_tflops": 191}
    attempt = sites.start(
        "boxed", site={"container": container, "gpu": gpu}, slurm={"container_image": "/images/none.sif"}
    )
    assert report(attempt, 1)["environment"]["IN_CONTAINER"] == "stand-in"
    assert report(attempt, 1)["cwd"] == str(sites.folder)
    words = (sites.folder / "words-1").read_text().splitlines()
    assert words[:4] == ["exec", "--no-home", "--rocm", f"--bind={sites.folder}:{sites.folder}"]
    assert words[4:6] == [f"--pwd={sites.folder}", "/images/none.sif"]


@pytest.mark.skipif(CONTAINER_COMMAND is None, reason="neither apptainer nor singularity is installed")
def test_ranks_run_in_a_real_container(sites: Sites, tmp_path: Path) -> None:
    """The image is a directory that borrows the machine's programs. Its root shows whether a rank is inside."""
    image = tmp_path / "image"
    for folder in ("etc", "usr", "proc", "sys", "dev", "tmp", "root", "home", "var/tmp", "only-in-the-image"):
        (image / folder).mkdir(parents=True)
    for link in ("bin", "lib", "lib64"):
        (image / link).symlink_to(f"usr/{link}")
    shutil.copy("/etc/passwd", image / "etc")
    container = {
        "kind": "apptainer",
        "command": CONTAINER_COMMAND,
        "image": "/not/this/one.sif",
        "options": ["--userns"],
        "mounts": ["/usr", *sorted({str(PROBE.parent), sys.prefix, sys.base_prefix} - {"/usr"})],
    }
    run = sites.start("real-box", site={"container": container}, slurm={"container_image": str(image)})
    for rank in (0, 1):
        assert "only-in-the-image" in report(run, rank)["root"]
        assert report(run, rank)["cwd"] == str(sites.folder)
        assert report(run, rank)["environment"]["RANK"] == str(rank)
    assert json.loads((run.path / "exit.json").read_text())["reason"] == "finished"


def test_srun_takes_the_options_of_pyxis(sites: Sites) -> None:
    """A plugin with the options of pyxis, made here: srun itself reads them, and ranks get what it read. It mounts
    nothing."""
    plugin = build_stand_in(sites)
    try:
        image = "/images/py torch.sqsh"
        attempt = sites.start(
            "pyxis",
            site={"container": {"kind": "pyxis", "mount_home": False, "options": ["--container-name=train"]}},
            slurm={"container_image": image},
        )
    finally:
        plugin.unlink()
    said = dict(line.partition("=")[::2] for line in (sites.folder / "pyxis.txt").read_text().splitlines())
    here = str(sites.folder)
    assert said["container-image"] == image
    assert said["container-mounts"] == f"{here}:{here}"
    assert (said["container-workdir"], said["container-name"]) == (here, "train")
    assert "no-container-mount-home" in said
    assert said["container-env"].split(",")[:2] == ["MASTER_ADDR", "MASTER_PORT"]
    assert report(attempt, 1)["environment"]["RANK"] == "1"


def build_stand_in(sites: Sites) -> Path:
    """Compile the plugin and have this cluster's srun load it. Return the file that loads it."""
    compiler, version = shutil.which("cc") or shutil.which("gcc"), sites.cluster.run("srun", "--version").stdout
    if compiler is None:
        pytest.skip("no C compiler")
    major, minor, micro = (int("".join(filter(str.isdigit, part)) or 0) for part in version.split()[1].split(".")[:3])
    library = sites.folder / "pyxis_options.so"
    source = PROBE.with_name("pyxis_options.c")
    number = f"-DVERSION={major << 16 | minor << 8 | micro}"
    where = f'-DSAID="{sites.folder / "pyxis.txt"}"'
    subprocess.run([compiler, "-shared", "-fPIC", number, where, "-o", str(library), str(source)], check=True)
    loader = sites.cluster.directory / "plugstack.conf"
    loader.write_text(f"required {library}\n")
    os.sync()
    return loader
