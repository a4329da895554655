"""Checkpoints, run files, submissions and sizes that change between attempts, or while one begins."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from bigsci_launch.runs.layout import RunDir
from recovering.attack import SLOW, Attack, Expected
from recovering.attacked_run import StartedRun
from recovering.cases import Layout
from recovering.injured_run import BSL

EQUAL = Expected(equal=True)
ROUNDED = Expected(equal=True, tolerance=1e-6)
WIDE = Layout(tp=2, pp=2, dp=2, precision="fp32", dropout=0.0)
DEEP = ("parallelism.tensor_parallel_size=1", "parallelism.pipeline_parallel_size=4")
LONGEST_REFUSAL_S = 60.0


def _set(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def _stop_after(run: StartedRun, steps: int, *more: str) -> None:
    run.start(*_set(f"training.stop_after_steps={steps}", *more))
    run.wait()
    run.claim(f"the first part ends with 0, not {run.exit_code}", run.exit_code == 0)


def _convert(run: StartedRun) -> None:
    _stop_after(run, 12)
    whole, parts = time.monotonic(), run.path.with_name(f"{run.name}-converted")
    words = ("checkpoint", "convert", str(run.run.path), "--pp", "1", "--dp", "1", "-o")
    run.claim("it converts", run.bsl(*words, f"{parts}-first").returncode == 0)
    whole = time.monotonic() - whole
    for number in range(10):
        _killed_after(whole * (0.3 + 0.065 * number), (*words, str(parts)))
        found = run.bsl("checkpoint", "verify", parts) if any(parts.glob("global_step*")) else None
        run.claim(f"no part is visible after kill {number}", found is None or found.returncode == 0)
        if found is not None:
            break
    done = run.bsl(*words, parts)
    run.note(f"killed {number + 1} times; then the conversion ends with {done.returncode}")
    run.claim("what was converted is equal", run.bsl("diff-weights", run.run.path, parts).returncode == 0)
    run.start()


def _killed_after(seconds: float, words: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BSL, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(seconds)
    process.kill()
    process.wait()


REFUSED = {
    "run.seed=7": "seed",
    "model.hidden_size=32": "hidden_size",
    "parallelism.data_parallel_size=1": "dp: 2 -> 1",
    "training.precision=bf16": "precision",
    "data.prefix=/nonexistent/x": "/nonexistent/x",
}
ALLOWED = (
    "optimizer.learning_rate=2e-3",
    "training.micro_batch_size=4",
    "training.steps=50",
    "optimizer.clip_grad=0.5",
)


def _changed(run: StartedRun) -> None:
    _stop_after(run, 12)
    for change, word in REFUSED.items():
        done = run.submit_at_once(*_set(change, "training.stop_after_steps=1"))
        run.claim(f"{change} is refused and named", done.returncode != 0 and word in done.stdout + done.stderr)
    for change in ALLOWED:
        done = run.bsl("submit", run.path, "--local", "--dry-run", *_set(change))
        run.claim(f"{change} is allowed: {done.stderr[-100:]}", done.returncode == 0)
    run.start()


def _there_and_back(run: StartedRun) -> None:
    """The middle and the first third are runs of their own, in other folders."""
    first, second = (RunDir(run.run.path.with_name(f"{run.name}-{number}")) for number in (1, 2))
    deep = Layout(tp=1, pp=4, dp=2, precision="fp32", dropout=0.0)
    run.earlier += [(first, WIDE), (second, deep)]
    _stop_after(run, 10, f"run.name={first.name}")
    _converted(run, first, ("--tp", "1", "--pp", "4"), second)
    _stop_after(run, 10, f"run.name={second.name}", *DEEP)
    _converted(run, second, ("--tp", "2", "--pp", "2"), run.run)
    run.start()


def _converted(run: StartedRun, source: RunDir, layout: tuple[str, ...], to: RunDir) -> None:
    done = run.bsl("checkpoint", "convert", source.path, *layout, "-o", to.checkpoints)
    run.claim(f"it converts: {done.stderr[-200:]}", done.returncode == 0)
    same = run.bsl("diff-weights", source.path, to.checkpoints)
    run.claim("what was converted is equal", same.returncode == 0)


def _damaged(run: StartedRun) -> None:
    _stop_after(run, 12)
    latest = run.run.checkpoints / "latest"
    good = latest.read_bytes()
    texts = {
        "random bytes": os.urandom(300),
        "a path out of the folder": b"../../../etc",
        "an absolute path": b"/etc",
        "a byte order mark": b"\xef\xbb\xbf" + good,
        "another step": b"global_step5",
        "nothing": b"",
        "control characters": b"\x1b[31mglobal_step12\x07",
    }
    for name, text in texts.items():
        latest.write_bytes(text)
        _refused(run, name)
    latest.unlink()
    _refused(run, "no file")
    latest.mkdir()
    _refused(run, "a folder")
    latest.rmdir()
    os.mkfifo(latest)
    _refused(run, "a fifo")
    latest.unlink()
    latest.write_bytes(good)
    _flipped_shard(run, good.decode().strip())
    run.start()


def _refused(run: StartedRun, name: str) -> None:
    began = time.monotonic()
    try:
        done = run.bsl("submit", run.path, "--local", limit_s=LONGEST_REFUSAL_S)
    except subprocess.TimeoutExpired:
        run.claim(f"{name}: refused within {LONGEST_REFUSAL_S:g} s", False)
        return
    said = done.stdout + done.stderr
    run.claim(f"{name}: ends with 4, not {done.returncode}", done.returncode == 4)
    run.claim(f"{name}: latest is named", "latest" in said)
    run.claim(f"{name}: no control characters", all(each.isprintable() or each in "\n\t" for each in said))
    if time.monotonic() - began > 30:
        run.note(f"{name}: {time.monotonic() - began:.0f} s")


def _flipped_shard(run: StartedRun, tag: str) -> None:
    shard = max(run.run.checkpoints.joinpath(tag).glob("*optim*"), key=lambda each: each.stat().st_size)
    good = shard.read_bytes()
    shard.write_bytes(good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :])
    done = run.bsl("submit", run.path, "--local", limit_s=LONGEST_REFUSAL_S)
    said = done.stdout + done.stderr
    run.claim(f"a flipped bit: ends with 4, not {done.returncode}", done.returncode == 4)
    run.claim("a flipped bit: the shard is named", shard.name in said)
    shard.write_bytes(good)


def _five(run: StartedRun) -> None:
    outputs = [run.path.with_suffix(f".out{number}") for number in range(5)]
    command = [sys.executable, "-c", BSL, "submit", str(run.path), "--local"]
    places = [path.open("wb") for path in outputs]
    five = [
        subprocess.Popen(command, env=run.environment(), cwd=run.path.parent, stdout=place, stderr=subprocess.STDOUT)
        for place in places
    ]
    codes = sorted(each.wait() for each in five)
    run.claim(f"one ends with 0, four with 2, not {codes}", codes == [0, 2, 2, 2, 2])
    told = [path.read_text() for path in outputs]
    run.claim("no one is given another name", not any("choose another run.name" in each for each in told))
    run.claim("there is one attempt", len(run.run.attempts()) == 1)
    run.exit_code = codes[0]


def _sizes(run: StartedRun) -> None:
    pid = run.rank_pid(3)
    time.sleep(3)
    run.note(f"first KILL after step {run.step()}")
    run.kill(pid)
    run.until(15)
    run.kill(run.rank_pid(2))


def _memory_and_kill(run: StartedRun) -> None:
    run.until(13)
    time.sleep(0.15)
    run.kill(run.rank_pid(2))


AUTO = {"training": {"micro_batch_size": "auto"}}
OUT_OF_MEMORY = {"kind": "out_of_memory", "rank": 1, "step": 14, "place": "backward", "above": 1}
ATTACKS = (
    Attack("convert", "checkpoints", "21. KILL in `checkpoint convert`, at 10 moments", _convert, EQUAL, starts=False),
    Attack("changed", "run file", "27. nine changes of the run file between attempts", _changed, EQUAL, starts=False),
    Attack(
        "there-and-back",
        "checkpoints",
        "28. tp2 pp2 dp2, tp1 pp4 dp2 and back",
        _there_and_back,
        Expected(equal=True, tolerance=1e-5),
        layout=WIDE,
        settings={"model": {"num_layers": 6}},
        starts=False,
        limit_s=500,
    ),
    Attack(
        "damaged-latest",
        "checkpoints",
        "29. ten kinds of damaged `latest`, and a flipped bit",
        _damaged,
        EQUAL,
        starts=False,
        limit_s=600,
    ),
    Attack("five", "run file", "30. five submissions at once", _five, EQUAL, starts=False),
    Attack(
        "auto-killed",
        "sizes",
        "35. `micro_batch_size: auto`, KILL in the search and at step 15",
        _sizes,
        ROUNDED,
        settings=AUTO,
    ),
    Attack(
        "auto-memory",
        "sizes",
        "36. `auto`: out of memory and KILL in one step",
        _memory_and_kill,
        ROUNDED,
        settings={**AUTO, "faults": [SLOW, OUT_OF_MEMORY]},
    ),
)
