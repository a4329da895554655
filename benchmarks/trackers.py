"""Three attempts, one run: what each experiment tracker has after `bsl metrics --follow`.

    python benchmarks/trackers.py [--report docs/measurements/trackers.md]

wandb and mlflow are installed into an environment of their own (about 300 MB). The second attempt does ten steps again,
as after a restart from a checkpoint. In the second row of a tracker, each follower is killed (SIGKILL) at the worst
moment: the steps are given, and the cursor is not written yet. A new one continues. Each tracker is read back by its
own reader; W&B's files of offline runs have none in Python, so their records are read here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow")
HEAVY = {"wandb", "mlflow"}
PACKAGES = (
    "wandb",
    "mlflow-skinny",
    "sqlalchemy",
    "alembic",
    "sqlparse",
    "click",
    "rich",
    "pyyaml",
    "jinja2",
    "pydantic",
)
ATTEMPTS = ((1, 61), (51, 121), (121, 151))
NEWEST = ATTEMPTS[-1][-1] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--packages", type=Path, help="environment with the packages; default: a new one")
    parser.add_argument("--child", nargs=4, metavar=("VERB", "RUN", "TRACKER", "KILLED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        heavy = options.packages or environment(Path(folder) / "environment")
        own = Path(sys.executable)
        rows = [row(heavy if name in HEAVY else own, Path(folder), name, killed)
                for name in TRACKERS for killed in (False, True)]  # fmt: skip
    text = "\n".join([HEAD, *rows])
    print(text)
    if options.report:
        before, _, rest = options.report.read_text().partition("<!-- table -->\n")
        options.report.write_text(f"{before}<!-- table -->\n{text}\n{rest[rest.index('<!-- end -->') :]}")


COLUMNS = ("tracker", "version", "followers killed", "runs", "steps", "gaps", "steps twice", "notes")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def row(python: Path, folder: Path, name: str, killed: bool) -> str:
    """Follow three attempts with one tracker, and return what it has as a row of the table."""
    run = folder / f"{name}-{killed}" / "runs" / "three"
    for number, (first, last) in enumerate(ATTEMPTS, 1):
        write_attempt(run, number, range(first, last))
        if killed:
            ask(python, "follow", run, name, "1")
        ask(python, "follow", run, name, "0")
    found = ask(python, "read", run, name, "0")
    steps = found["steps"]
    gaps, doubled = NEWEST - len(set(steps)), len(steps) - len(set(steps))
    seen = [
        name,
        found["version"],
        "yes" if killed else "no",
        found["runs"],
        len(set(steps)),
        gaps,
        doubled,
        found["notes"],
    ]
    return f"| {' | '.join(map(str, seen))} |"


def write_attempt(run: Path, number: int, steps: range) -> None:
    """Write what a rank and its job leave."""
    attempt = run / "attempts" / f"{number:04d}"
    for name in ("events", "pids", "logs"):
        (attempt / name).mkdir(parents=True)
    document = {"schema_version": 1, "name": "three", "run_id": "abc123", "topology": {"tp": 1, "pp": 1, "dp": 1}}
    (run / "run.json").write_text(json.dumps(document))
    job = {
        "scheduler": "slurm",
        "submitted": time.time(),
        "job_id": str(number),
        "launcher": None,
        "total_steps": NEWEST,
    }
    (attempt / "job.json").write_text(json.dumps(job))
    lines = [{"kind": "step", "time": time.time(), "mono": float(step), "step": step, "loss": 1 / step, "seconds": 0.5}
             for step in steps]  # fmt: skip
    (attempt / "events" / "rank-0000.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def ask(python: Path, verb: str, run: Path, name: str, killed: str) -> dict[str, object]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(run.parent / "trackio"),
    }
    argv = [python, __file__, "--child", verb, run, name, killed]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != (-signal.SIGKILL if killed == "1" else 0):
        raise SystemExit(f"{name}: {verb} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1]) if verb == "read" else {}


def child(verb: str, folder: str, name: str, killed: str) -> None:
    from bigsci_launch.export import follow
    from bigsci_launch.runs.layout import RunDir

    run = RunDir(Path(folder))
    if verb == "read":
        print(json.dumps(READERS[name](run)))
        return
    follow.MOST_AT_ONCE = 20
    follower = follow.TrackerFollower(run, name)
    if killed == "1":
        count = iter([None])
        write = follower._write_cursor
        follower._write_cursor = lambda: write() if next(count, 0) is None else os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    follower.catch_up()
    follower.close()


def read_tensorboard(run: object) -> dict[str, object]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.version import VERSION

    found = EventAccumulator(str(run.tracker_files("tensorboard")), size_guidance={"scalars": 0})  # type: ignore[attr-defined]
    found.Reload()
    steps = [event.step for event in found.Scalars("loss")]
    return {"version": VERSION, "runs": 1, "steps": steps, "notes": len(found.Tensors("notes"))}


def read_trackio(run: object) -> dict[str, object]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_run_records("bsl")
    steps = [each["step"] for each in SQLiteStorage.get_logs("bsl", runs[0]["name"])]
    notes = SQLiteStorage.get_alerts("bsl", runs[0]["name"])
    return {"version": trackio.__version__, "runs": len(runs), "steps": steps, "notes": len(notes)}


def read_mlflow(run: object) -> dict[str, object]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run.tracker_files('mlflow') / 'mlflow.db'}")  # type: ignore[attr-defined]
    runs = client.search_runs([client.get_experiment_by_name("bsl").experiment_id])
    steps = [each.step for each in client.get_metric_history(runs[0].info.run_id, "loss")]
    notes = [name for name in runs[0].data.tags if name.startswith("note.")]
    return {"version": mlflow.__version__, "runs": len(runs), "steps": steps, "notes": len(notes)}


def read_wandb(run: object) -> dict[str, object]:
    import wandb
    from wandb.proto import wandb_internal_pb2

    ids, steps, notes = set(), [], 0
    for path in sorted(run.tracker_files("wandb").glob("wandb/offline-run-*/run-*.wandb")):  # type: ignore[attr-defined]
        ids.add(path.stem)
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            notes += kind == "alert"
            if kind == "history":
                steps.append(record.history.step.num)
    return {"version": wandb.__version__, "runs": len(ids), "steps": steps, "notes": notes}


def wandb_records(data: bytes, block: int = 1 << 15) -> list[bytes]:
    """Return the records of a file of W&B: LevelDB's log format after a head of 7 bytes."""
    found, whole, at = [], b"", 7
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            found.append(whole)
            whole = b""
    return found


READERS = {"tensorboard": read_tensorboard, "trackio": read_trackio, "wandb": read_wandb, "mlflow": read_mlflow}

if __name__ == "__main__":
    main()
