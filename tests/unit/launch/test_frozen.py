"""What an attempt freezes, and who may write it: no umask opens it to others, and the job script looks first."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from bigsci_launch.errors import RunDirError
from bigsci_launch.launch.freeze import make_own_folder
from tests.support.command import invoke
from tests.support.texts import CheckText, has_parts

from ..other_users import ALICE, AS_ROOT, MALLORY, PROJECT

pytestmark = pytest.mark.slow

RunFile = Callable[..., Path]
RUN = Path("runs/trial")
SECRET, HOOK = "AccountKey=Zm9vYmFyc2VjcmV0", "https://chat.example/hooks/abcdef"
ENV = {"MY_CONN": {"value": SECRET, "reason": "the store"}, "NCCL_DEBUG": {"value": "INFO", "reason": "its words"}}
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a file of another user")


@pytest.fixture
def slurm(fake_slurm: Callable[..., Any]) -> Any:
    fake = fake_slurm("sbatch", "squeue")
    fake.answer("sbatch", "77\n")
    fake.answer("squeue", "")
    return fake


@pytest.fixture
def under() -> Iterator[Callable[[int], int]]:
    """`under(0o002)` sets the umask for the rest of the test."""
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(path): stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize("umask", [0o002, 0o007, 0o077])
def test_nobody_else_may_write_what_a_job_runs_and_few_may_read_its_values(
    slurm: Any, run_file: RunFile, under: Callable[[int], int], umask: int
) -> None:
    path = str(run_file(env=ENV, monitor={"notify": {"webhook": HOOK}}))
    under(umask)
    assert invoke("submit", path, "--set", "env.MORE={value: cmdline-secret, reason: it is tried}").exit_code == 0
    found = {**modes(RUN / "attempts"), str(RUN): stat.S_IMODE(RUN.stat().st_mode)}
    assert not [name for name, mode in found.items() if mode & 0o022]
    assert (RUN / "attempts" / "0001" / "job.out").is_file(), "Slurm would make it as the umask says"
    for name, mode in found.items():
        text = Path(name).read_bytes() if Path(name).is_file() else b""
        if any(secret.encode() in text for secret in (SECRET, HOOK, "cmdline-secret")):
            assert Path(name).name in ("config.yaml", "script.sh") and mode & ~(0o750 & ~umask) == 0, (name, oct(mode))


def test_python_takes_no_bytecode_that_somebody_else_could_have_put_there(
    slurm: Any, run_file: RunFile, under: Callable[[int], int]
) -> None:
    path = str(run_file())
    under(0o000)
    assert invoke("submit", path).exit_code == 0
    tools = RUN / "attempts" / "0001" / "tools"
    folders = {each.parent / "__pycache__" for each in tools.rglob("*.py")}
    assert {stat.S_IMODE(each.stat().st_mode) for each in folders} == {0o555}
    subprocess.run([sys.executable, "-I", "-S", str(tools / "rank_runner.py"), "--help"], check=True)
    assert not list(tools.rglob("*.pyc"))


def run_script() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", str(RUN.resolve() / "attempts" / "0001" / "script.sh")],
        env={
            **os.environ,
            "PATH": f"{os.environ['PATH']}:/usr/bin:/bin",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n0",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def open_to(name: str, mode: int) -> Callable[[Path], Path]:
    def change(attempt: Path) -> Path:
        (attempt / name).chmod(mode)
        return attempt / name

    return change


def link_tools(attempt: Path) -> Path:
    (attempt / "tools").rename(attempt / "other")
    (attempt / "tools").symlink_to("other")
    return attempt / "tools"


def give_tool_away(attempt: Path) -> Path:
    os.chown(attempt / "tools" / "bsl-job.pyz", NOBODY, -1)
    return attempt / "tools" / "bsl-job.pyz"


def test_a_job_starts_nothing_that_somebody_else_could_have_written(slurm: Any, run_file: RunFile) -> None:
    invoke("submit", str(run_file()))
    kept = Path("kept").absolute()
    RUN.rename(kept)
    changes = [open_to("tools/bsl-job.pyz", 0o664), open_to("tools/ring_site", 0o777), open_to("config.yaml", 0o660)]
    changes += [open_to("..", 0o2775), link_tools, *([give_tool_away] if os.geteuid() == 0 else [])]
    for change in changes:
        shutil.copytree(kept, RUN, symlinks=True)
        changed = change(RUN.resolve() / "attempts" / "0001").absolute()
        before = sorted(modes(RUN))
        done = run_script()
        shown = os.path.normpath(changed)
        assert done.returncode == 77
        assert f" {shown}, " in done.stdout
        assert len(done.stdout.splitlines()) == 1 and sorted(modes(RUN)) == before, "nothing ran that writes a record"
        shutil.rmtree(RUN)


def test_a_job_that_cannot_look_starts_nothing(slurm: Any, run_file: RunFile) -> None:
    invoke("submit", str(run_file()))
    (RUN / "attempts" / "0001" / "config.yaml").unlink()
    done = run_script()
    assert done.returncode == 77 and "attempt 0001" in done.stdout


def test_a_folder_name_is_never_executed(slurm: Any, run_file: RunFile) -> None:
    """bash executes what a name has in brackets, if it takes it for arithmetic."""
    invoke("submit", str(run_file()))
    (RUN / "attempts" / "0001" / "job.json").unlink()
    (RUN / "attempts" / "9+a[$(touch PWNED)]").mkdir(mode=0o755)
    done = run_script()
    assert "start attempt=0001" in done.stdout and not list(Path().rglob("PWNED")), done.stderr


def test_folders_of_before_are_closed_and_keep_their_group(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o2775)
    make_own_folder(tmp_path / "run")
    make_own_folder(tmp_path / "run" / "attempts")
    assert modes(tmp_path / "run") == {str(tmp_path / "run"): 0o2755, str(tmp_path / "run" / "attempts"): 0o2755}


@as_root
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, -1)
    with pytest.raises(RunDirError, match=str(tmp_path)):
        make_own_folder(tmp_path)


# ------------------------------------------------------------------------------------------- the folders above


@pytest.fixture
def reachable(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder is one that others can reach: each start of pytest closes the folder of its own ones."""
    with TemporaryDirectory(prefix="bsl-test-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)
        monkeypatch.chdir(folder)
        yield Path(folder).resolve()


def share(folder: Path, owner: int, mode: int) -> Path:
    """Make a folder of `owner` with the project's group."""
    folder.mkdir()
    os.chown(folder, owner, PROJECT)
    folder.chmod(mode)  # chown takes bits away
    return folder.resolve()


@AS_ROOT
def test_a_root_in_which_others_may_rename_is_refused_with_the_way_out(
    slurm: Any, run_file: RunFile, reachable: Path, check_text: CheckText
) -> None:
    path, root = str(run_file()), share(Path("runs"), 0, 0o2775)
    done = invoke("submit", path)
    assert done.exit_code == 2 and not list(root.iterdir()) and not slurm.calls("sbatch")
    os.chown(root, ALICE, PROJECT)
    check_text(*(text.replace(str(reachable), "HERE") for text in (done.stderr, invoke("submit", path).stderr)))
    root.chmod(0o3775)
    assert invoke("submit", path).exit_code == 0
    root.chmod(0o2775)
    assert "trial" in invoke("list").stdout
    assert "77" in invoke("status", str(RUN)).stdout
    assert f"{root}: " in invoke("submit", path).stderr


@AS_ROOT
def test_a_folder_further_up_is_refused_if_it_is_ours_and_said_if_it_is_anothers(
    slurm: Any, run_file: RunFile, reachable: Path
) -> None:
    path, above = str(run_file(run={"name": "trial", "command": ["true"], "root": "project/mine"})), Path("project")
    above = share(above, 0, 0o2775)
    assert f"`chmod +t {above}`" in invoke("submit", path).stderr
    os.chown(above, ALICE, PROJECT)
    done = invoke("submit", path)
    assert done.exit_code == 0 and has_parts(done.stderr, f"uid {ALICE}", f"`chmod +t {above}`")
    assert "chmod" not in invoke("submit", path).stderr


@AS_ROOT
def test_a_group_without_others_and_a_closed_folder_let_nobody_rename(
    slurm: Any, run_file: RunFile, reachable: Path
) -> None:
    path, root = str(run_file()), share(Path("runs"), 0, 0o775)
    os.chown(root, 0, 0)
    assert invoke("submit", path).exit_code == 0, "the group of this user alone, as with umask 002"
    os.chown(root, 0, PROJECT)
    another = ("submit", path, "--set", "run.name=another")
    assert invoke(*another).exit_code == 2
    root.parent.chmod(0o700)
    assert invoke(*another).exit_code == 0, "nobody else gets to it"


def acl_of(user: int) -> bytes:
    """Return what `setfacl -m u:USER:rwx` sets on a folder of mode 0755: the mask then shows as the group's bits."""
    nobody = 0xFFFFFFFF
    entries = ((1, 7, nobody), (2, 7, user), (4, 5, nobody), (0x10, 7, nobody), (0x20, 5, nobody))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@AS_ROOT
def test_whom_a_list_of_access_names_may_rename(slurm: Any, run_file: RunFile, reachable: Path) -> None:
    path, root = str(run_file()), share(Path("runs"), 0, 0o755)
    os.chown(root, 0, 0)
    assert invoke("submit", path).exit_code == 0
    os.setxattr(root, "system.posix_acl_access", acl_of(MALLORY))
    assert (root.stat().st_mode & 0o777, root.stat().st_gid) == (0o775, 0)
    assert f"{root}: " in invoke("submit", path, "--set", "run.name=another").stderr
    done = run_script()
    assert done.returncode == 77 and f" {root}, " in done.stdout


@AS_ROOT
@pytest.mark.parametrize("listed", ["echo eve:x:64102:0::/:/bin/sh", "echo root:x:0:0::/:/bin/sh; exit 2"])
def test_the_first_group_of_another_account_is_not_ones_own(
    slurm: Any, run_file: RunFile, reachable: Path, listed: str
) -> None:
    """No list of members names such an account. One that does not list the accounts does not say that there is none."""
    path, root = str(run_file()), share(Path("runs"), 0, 0o775)
    os.chown(root, 0, 0)
    assert invoke("submit", path).exit_code == 0
    getent = slurm.folder / "bin" / "getent"
    getent.write_text(f'#!/bin/sh\n[ "$1" = passwd ] || exec /usr/bin/getent "$@"\n{listed}\n')
    getent.chmod(0o755)
    assert f"{root}: " in invoke("submit", path, "--set", "run.name=another").stderr
    done = run_script()
    assert done.returncode == 77 and f" {root}, " in done.stdout


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_a_root_that_is_made_is_the_users_own(
    slurm: Any, run_file: RunFile, under: Callable[[int], int], umask: int
) -> None:
    path = str(run_file(run={"name": "trial", "command": ["true"], "root": "much/deeper"}))
    under(umask)
    assert invoke("submit", path).exit_code == 0
    assert not [name for name in ("much", "much/deeper") if Path(name).stat().st_mode & 0o022]


COLLEAGUE = f"""#!{sys.executable} -IS
import os, shutil
run, program = {{run!r}}, "import os; open(os.path.join({{marks!r}}, str(os.getuid())), 'w')"
os.chmod(os.path.dirname(run), 0o2775)
os.setgroups([{PROJECT}]); os.setgid({MALLORY}); os.setuid({MALLORY})
shutil.copytree(run, run + ".theirs")
for folder, _, names in os.walk(run + ".theirs/attempts/0001/tools"):
    for name in names:
        open(os.path.join(folder, name), "w").write(program)
os.rename(run, run + ".away")
os.rename(run + ".theirs", run)
"""
"""In the place of srun: a colleague who exchanges the run while its ranks run, once its root lets them."""


@AS_ROOT
@pytest.mark.parametrize("chain", [False, True])
def test_nothing_of_a_colleague_runs_at_the_end_of_a_job_whose_run_they_exchange(
    slurm: Any, run_file: RunFile, reachable: Path, chain: bool
) -> None:
    root, marks = share(Path("runs"), 0, 0o3775), reachable / "marks"
    marks.mkdir()
    marks.chmod(0o777)
    more = {"chain": {"by": "requeue"}} if chain else {}
    path = run_file(slurm={"site": "minicluster", "nodes": 2, "time_limit": "01:00:00", **more})
    assert invoke("submit", str(path)).exit_code == 0
    exchange = COLLEAGUE.format(run=str(root / "trial"), marks=str(marks))
    for name, program in (("srun", exchange), ("scontrol", "#!/bin/sh\necho n0\n")):
        (slurm.folder / "bin" / name).write_text(program)
        (slurm.folder / "bin" / name).chmod(0o755)
    done = run_script()
    assert (root / "trial").stat().st_uid == MALLORY, done.stderr
    assert list(marks.iterdir()) == []
    assert has_parts(done.stderr, "exit.json", f" {root / 'trial'}, ")
    assert has_parts(done.stdout, f" {root / 'trial'}, ") is chain, "the program that decides whether the run continues"


def test_a_job_whose_root_was_opened_since_then_starts_nothing(slurm: Any, run_file: RunFile, reachable: Path) -> None:
    invoke("submit", str(run_file()))
    RUN.parent.chmod(0o777)
    done = run_script()
    assert done.returncode == 77 and len(done.stdout.splitlines()) == 1
    assert f" {RUN.parent.resolve()}, " in done.stdout


def test_no_value_that_may_be_a_secret_is_shown(slurm: Any, run_file: RunFile) -> None:
    path = str(run_file(env=ENV, monitor={"notify": {"webhook": HOOK}}))
    for words in (["config", "show"], ["submit", "--dry-run"]):
        for more in ([], ["--json"]):
            shown = invoke(*words, path, *more).stdout
            assert "Zm9vYmFyc2VjcmV0" not in shown and "abcdef" not in shown
            assert "INFO" in shown and "<secret>" in shown, "what is known to be harmless is shown"
    shown = invoke("config", "show", path).stdout.replace('"https://chat', '"https://chat')
    Path("again.yaml").write_text(shown)
    assert "env.MY_CONN.value: <secret> " in invoke("config", "check", "again.yaml").stderr


def test_a_variable_of_the_environment_is_stored_nowhere(
    slurm: Any, run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(run_file(env={"MY_CONN": {"from": "environment", "reason": "the store"}}))
    monkeypatch.delenv("MY_CONN", raising=False)
    done = invoke("submit", path)
    assert done.exit_code == 2 and "env.MY_CONN.from: MY_CONN " in done.stderr
    assert not RUN.exists() and invoke("submit", path, "--dry-run").exit_code == 0
    monkeypatch.setenv("MY_CONN", SECRET)
    assert invoke("submit", path).exit_code == 0
    files = [each for each in RUN.rglob("*") if each.is_file()]
    assert not [each for each in files if SECRET.encode() in each.read_bytes()]
    [call] = slurm.calls("sbatch")
    assert call["argv"][:2] == ["sbatch", "--parsable"], "sbatch passes the environment on"
    monkeypatch.delenv("MY_CONN")
    done = run_script()
    assert done.returncode == 1 and "env.MY_CONN " in done.stderr


@pytest.mark.parametrize(
    "variable", [{"reason": "nothing given"}, {"value": "a", "from": "environment", "reason": "both"}]
)
def test_a_variable_has_one_origin(run_file: RunFile, variable: dict[str, str]) -> None:
    done = invoke("config", "check", str(run_file(env={"MY_CONN": variable})))
    assert done.exit_code == 2 and "env.MY_CONN: " in done.stderr


def test_the_resolved_config_reads_back(slurm: Any, run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    from bigsci_launch.config.load import load_resolved

    monkeypatch.setenv("MY_CONN", SECRET)
    invoke("submit", str(run_file(env={"MY_CONN": {"from": "environment", "reason": "the store"}})))
    variable = load_resolved(RUN / "attempts" / "0001" / "config.yaml").env["MY_CONN"]
    assert (variable.value, variable.source) == (None, "environment")
    assert json.loads((RUN / "attempts" / "0001" / "provenance.json").read_text())["other_variables"]


@pytest.mark.parametrize("letter", ["\u2028", "\x85", "\u200b"])
def test_a_letter_that_sbatch_cannot_read_is_refused_with_its_option(run_file: RunFile, letter: str) -> None:
    path = run_file(slurm={"site": "minicluster", "nodes": 2, "sbatch_options": [f"--mail-user=a{letter}b"]})
    done = invoke("submit", str(path), "--dry-run")
    assert done.exit_code == 2 and "sbatch option --mail-user" in done.stderr and not RUN.exists()
