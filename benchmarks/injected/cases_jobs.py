"""Failures of jobs: nodes are lost, Slurm or a person ends or requeues the job, or it never starts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from injected.case import Check, Injection, Look, Truth
from injected.field import Field, NotMade, Run, wait_until

Inject = Callable[[Field], Iterator[Look]]
HARM = (r"bsl cancel", r"scancel", r"batch host died")
HEALTHY = (*HARM, r"(?m)^lost node", r"\bended\b", r"bsl spy", r"died")
AGAIN = (r"bsl submit", r"submit it again", r"slurm\.exclude", r"bsl nodes", r"bsl logs")
LATER = {"sbatch_options": ["--begin=now+1hour"]}
TRAIN = ("training.steps=60", "checkpoint.save_interval=10")


def kill_nodes(run: Run, *indices: int, unplugged: bool = False) -> None:
    """Kill nodes; `unplugged` as in a power cut, so that nobody hears that their connections are closed."""
    for index in indices:
        if unplugged:
            run.cluster.unplug(run.nodes()[index])
        done = run.cluster.bsl("cluster", "kill-node", run.nodes()[index])
        if done.returncode != 0:
            raise NotMade(done.stderr)


def node_killed(field: Field) -> Iterator[Look]:
    run = field.submit(nodes=3)
    run.wait_for_line("iteration 2")
    nodes = run.nodes()
    kill_nodes(run, 1)
    run.wait_over()
    yield run.look(nodes=nodes)


def batch_host_killed(field: Field) -> Iterator[Look]:
    run = field.submit(nodes=3)
    run.wait_for_line("iteration 2")
    nodes = run.nodes()
    kill_nodes(run, 0)
    run.wait_over()
    yield run.look(nodes=nodes)


def two_nodes_killed(field: Field) -> Iterator[Look]:
    run = field.submit(nodes=4)
    run.wait_for_line("iteration 2")
    nodes = run.nodes()
    kill_nodes(run, 1, 2)
    run.wait_over()
    look = run.look()
    exit_of = (look.document or {}).get("exit") or {}
    named = (exit_of.get("first_failure") or {}).get("node")
    grade = "unknown" if named is None else "right" if named in nodes[1:3] else "wrong"
    yield run.look("", Check("node", grade, f"{named} blamed, true are {' and '.join(nodes[1:3])}"), nodes=nodes)


def node_crashed(field: Field) -> Iterator[Look]:
    """The kernel closes all connections, so the other ranks fail long before Slurm notices that the node is gone."""
    run = field.submit(program="gloo_rank.py")
    run.wait_for_line("iteration 2")
    nodes = run.nodes()
    kill_nodes(run, 1)
    run.wait_over(120)
    yield run.look(nodes=nodes)


def node_killed_and_requeued(field: Field) -> Iterator[Look]:
    run = field.submit(program=(), sets=[*TRAIN, "slurm.requeue=true"])
    wait_until(lambda: "saved" in run.log(0), "the first checkpoint is saved", 150)
    nodes = run.nodes()
    kill_nodes(run, 1, unplugged=True)
    wait_until(lambda: "IDLE+" in node_state(run, nodes[1]) or "NOT_RESP" in node_state(run, nodes[1]), "it is noticed")
    yield run.look("while the node is silent", nodes=nodes)
    wait_until(lambda: run.attempt("0001.r1").is_dir(), "the job starts again", 150)
    yield run.look("after the requeue", *first_attempt(run, ("node_failure",), nodes[1]))
    run.wait_over(150)
    yield run.look("at the end")


def node_state(run: Run, node: str) -> str:
    return run.cluster.ask("scontrol", "show", "node", "-o", node).partition("State=")[2].split()[0]


def first_attempt(run: Run, reasons: tuple[str, ...], node: str | None = None) -> list[Check]:
    """What the record of the first attempt says, after the job was requeued."""
    path = run.attempt() / "exit.json"
    if not path.exists():
        return [Check("cause", "unknown", "the first attempt has no exit.json")]
    document = json.loads(path.read_text())
    named = (document["first_failure"] or {}).get("node")
    told = "right" if document["reason"] in reasons else "wrong"
    return [
        Check("cause", told, f"0001 ended with {document['reason']}, true is {' or '.join(reasons)}"),
        Check(
            "node", "right" if named == node else "unknown" if named is None else "wrong", f"0001: {named} is blamed"
        ),
    ]


def preempted(partition: str, *sets: str, program: str | tuple[str, ...] = "rank.py") -> Inject:
    """A job with a higher priority takes the nodes for some seconds."""

    def inject(field: Field) -> Iterator[Look]:
        run = field.submit(program=program, sets=[f"slurm.partition={partition}", "slurm.requeue=true", *sets])
        wait_until(lambda: "iteration" in run.log(0), "it makes a step", 120)
        time.sleep(3)
        urgent = ["-p", "urgent", "-N2", "--gres=gpu:2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5"]
        run.cluster.ask("sbatch", *urgent)
        wait_until(lambda: run.facts()["JobState"] != "RUNNING", "it is preempted", 60)
        yield run.look("when it was preempted")
        wait_until(lambda: run.attempt("0001.r1").is_dir() or run.facts()["JobState"] == "COMPLETED", "it starts again")
        yield run.look("later", *first_attempt(run, ("preempted",)))
        if program:
            run.cluster.ask("scancel", run.job_id)
        run.wait_over(150)
        if not program:
            yield run.look("at the end", finished(run))

    return inject


def finished(run: Run) -> Check:
    """Whether `bsl train` has made all of its steps."""
    document = run.look().document or {}
    step = document.get("step") or {}
    done = step.get("step") is not None and step["step"] == step["total_steps"]
    return Check(
        "cause", "right" if done else "wrong", f"step {step.get('step')} of {step.get('total_steps')} was made"
    )


def pending(field: Field) -> Iterator[Look]:
    cluster = field.cluster
    node = f"n{cluster.num_nodes - 1:02d}"
    cluster.ask("scontrol", "create", "partition=small", "Nodes=ALL", "MaxNodes=1", "State=UP")
    cluster.ask("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=fan")
    jobs = {
        "more nodes than the partition allows": field.submit(sets=["slurm.partition=small"], name="small"),
        "a drained node": field.submit(nodes=1, sets=[f"slurm.nodelist={node}"], name="drained"),
        "held": field.submit(nodes=1, name="held", site=LATER),
    }
    cluster.run("scontrol", "uhold", jobs["held"].job_id)
    try:
        for moment, run in jobs.items():
            wait_for_reason(run)
            yield run.look(moment)
    finally:
        cluster.run("scancel", *(run.job_id for run in jobs.values()))
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


def wait_for_reason(run: Run) -> None:
    unsaid = ("None", "Priority", "Resources", "BeginTime", "(null)", None)
    wait_until(lambda: run.facts().get("Reason") not in unsaid, "Slurm says why the job waits")


def cancelled_by_somebody(field: Field) -> Iterator[Look]:
    run = field.submit()
    run.wait_for_line("iteration 2")
    run.cluster.ask("scancel", run.job_id)
    run.wait_over()
    yield run.look()


def cancelled_while_pending(field: Field) -> Iterator[Look]:
    run = field.submit(nodes=1, site=LATER)
    run.cluster.ask("scancel", run.job_id)
    run.wait_over()
    yield run.look()


def time_limit_near(field: Field) -> Iterator[Look]:
    sets = [*TRAIN, "training.steps=20000", "slurm.time_limit=00:03:00", "monitor.exit_margin_s=100"]
    run = field.submit(program=(), nodes=1, sets=sets)
    run.wait_over(200)
    yield run.look()


def chained(field: Field) -> Iterator[Look]:
    sets = ["training.steps=400", "slurm.time_limit=00:01:00", "monitor.exit_margin_s=30", "slurm.chain={by: requeue}"]
    run = field.submit(program=(), nodes=1, sets=sets)
    run.wait_over(300)
    yield run.look("", finished(run))


def time_limit(field: Field) -> Iterator[Look]:
    run = field.submit("*@0=deaf", sets=["monitor.exit_margin_s=1"])
    run.wait_for_line("iteration 2")
    run.cluster.ask("scontrol", "update", f"JobId={run.job_id}", "EndTime=now")
    run.wait_over(120)
    yield run.look()


def refused(field: Field) -> Iterator[Look]:
    tries = {
        "partition": ("slurm.partition=nowhere", r"invalid partition"),
        "node": ("slurm.nodelist=n77", r"invalid node name|node.*not"),
        "reservation": ("slurm.reservation=nowhere", r"reservation"),
    }
    for name, (setting, words) in tries.items():
        done, directory = field.try_submit(sets=[setting], name=name)
        said = done.stderr.lower().replace("\n", " ")
        yield Look(
            name,
            checks=(
                Check("exit status", "right" if done.returncode == 3 else "wrong", f"exit code {done.returncode}"),
                Check("cause", "right" if re.search(words, said) else "unknown", f"said: {said}"),
                Check("next step", "wrong" if directory.exists() else "right", "a run directory was left"),
            ),
        )


def module_missing(field: Field) -> Iterator[Look]:
    run = field.submit(site={"activation": ["module load no-such-thing"]})
    run.wait_over()
    yield run.look()


def launcher_killed(field: Field) -> Iterator[Look]:
    for moment, program in (("srun", b"srun"), ("the batch shell", b"slurm_script")):
        run = field.submit(name="one" if program == b"srun" else "two")
        run.wait_for_line("iteration 2")
        os.kill(run.find_launcher(program), signal.SIGKILL)
        run.wait_over()
        yield run.look(moment, orphans(run))


def orphans(run: Run) -> Check:
    time.sleep(6)
    try:
        run.find_process({f"SLURM_JOB_ID={run.job_id}".encode()}, lambda _: True)
    except NotMade:
        return Check("next step", "right", "no process is left")
    return Check("next step", "wrong", "processes of the ranks are left")


def port_taken(field: Field) -> Iterator[Look]:
    """The port that the id of the next job gives is in use on the node, by another program."""
    newest = field.cluster.ask("sbatch", "--parsable", "-N1", "-o", "/dev/null", "--wrap", "true")
    with ExitStack() as stack:
        for job_id in range(int(newest) + 1, int(newest) + 3):
            listener = stack.enter_context(socket.socket())
            listener.bind(("0.0.0.0", 10000 + job_id % 20000))
            listener.listen()
        run = field.submit("0@0=bind", "steps=6")
        run.wait_over()
        yield run.look()


def drained(field: Field) -> Iterator[Look]:
    run = field.submit()
    run.wait_for_line("iteration 2")
    node = run.nodes()[1]
    run.cluster.ask("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=maintenance")
    yield run.look()
    run.cluster.ask("scancel", run.job_id)
    run.wait_over()
    run.cluster.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")


def suspended(field: Field) -> Iterator[Look]:
    run = field.submit()
    run.wait_for_line("iteration 2")
    run.cluster.ask("scontrol", "suspend", run.job_id)
    run.wait_state("SUSPENDED")
    yield run.look()
    run.cluster.ask("scontrol", "resume", run.job_id)
    run.cluster.ask("scancel", run.job_id)
    run.wait_over()


def requeued_by_hand(field: Field) -> Iterator[Look]:
    run = field.submit(sets=["slurm.requeue=true"])
    run.wait_for_line("iteration 2")
    run.cluster.ask("scontrol", "requeue", run.job_id)
    run.wait_state("PENDING")
    yield run.look("when it waits")
    wait_until(lambda: run.attempt("0001.r1").is_dir(), "it starts again")
    yield run.look("when it runs again", *first_attempt(run, ("requeued",)))
    run.cluster.ask("scancel", run.job_id)
    run.wait_over()


LOST = Truth(None, ("NODE_FAIL",), ("node_failure",), node_index=1, advice=AGAIN, never=HARM)
RUNS = Truth(states=("RUNNING",), never=HEALTHY)
STOPPED = Truth(0, ("COMPLETED",), ("stopped",), advice=("submit",), never=HARM)
CANCELLED = Truth(r"[1-9]\d*", ("CANCELLED",), ("cancelled",), never=(*HARM, r"(?m)^lost node", "NODE_FAIL"))
FINISHED = Truth(0, ("COMPLETED",), ("finished",), never=HARM)
WAITS = Truth(states=("PENDING", "COMPLETING", "RUNNING", "COMPLETED"), never=(*HARM, r"(?m)^lost node", "died"))
CASES = (
    Injection(
        "node-killed", "a node of the job loses power", node_killed, (LOST,), "right; the advice was gone at the end"
    ),
    Injection(
        "batch-host-killed",
        "the node of the job script loses power",
        batch_host_killed,
        (Truth(None, ("NODE_FAIL",), ("node_failure",), node_index=0, advice=AGAIN, never=HARM),),
        "no cause, no node",
    ),
    Injection(
        "node-killed-requeue",
        "a node loses power while `bsl train` runs with requeue",
        node_killed_and_requeued,
        (
            Truth(states=("RUNNING", "COMPLETING", "PENDING"), node_index=1, never=(*HARM, "only its slurmd")),
            WAITS,
            FINISHED,
        ),
        "advised to cancel a job about to be requeued",
        needs_torch=True,
    ),
    Injection(
        "refused",
        "sbatch refuses partition, node, reservation",
        refused,
        (Truth(), Truth(), Truth()),
        "right",
    ),
    Injection(
        "preempted",
        "preempted without grace time",
        preempted("hasty"),
        (WAITS, WAITS),
        "called requeued, not preempted",
        "preempting",
    ),
    Injection(
        "preempted-grace",
        "`bsl train` preempted with grace time; it saves and ends with 0",
        preempted("patient", *TRAIN, "slurm.chain={by: requeue}", program=()),
        (WAITS, WAITS, FINISHED),
        "completed at step 1, never requeued",
        "preempting",
        needs_torch=True,
    ),
    Injection(
        "pending",
        "jobs that never start: too many nodes, a drained node, held back",
        pending,
        (
            Truth(states=("PENDING",), words=("waits because", "PartitionNodeLimit"), advice=("slurm.nodes",)),
            Truth(states=("PENDING",), words=("waits because", "drained|down"), advice=("sinfo -R",)),
            Truth(states=("PENDING",), words=("waits because", "holds it back"), advice=("scontrol release",)),
        ),
        "Slurm's word alone, no advice",
    ),
    Injection("scancel", "a person cancels the job", cancelled_by_somebody, (CANCELLED,), "right"),
    Injection(
        "time-limit-near",
        "`bsl train` saves and stops before the time limit",
        time_limit_near,
        (STOPPED,),
        "right, but no word on submitting again",
        needs_torch=True,
    ),
    Injection(
        "time-limit",
        "the time limit ends a program that ignores signals",
        time_limit,
        (Truth(None, ("TIMEOUT",), ("time_limit",), never=(*HARM, r"(?m)^lost node")),),
        "right",
    ),
    Injection(
        "module-missing",
        "the activation lines fail: no command `module`",
        module_missing,
        (
            Truth(
                127,
                ("FAILED",),
                ("launch_failed",),
                words=("module: command not found",),
                advice=("bsl logs",),
                never=HARM,
            ),
        ),
        "no cause, no advice",
    ),
    Injection(
        "launcher-killed",
        "srun, and another time the job script, is killed",
        launcher_killed,
        (
            Truth(
                137,
                ("FAILED",),
                ("crashed", "unknown", "launcher_killed"),
                words=("no rank failed",),
                never=(r"(?m)^lost node", "node_failure"),
            ),
            Truth(
                None,
                ("FAILED",),
                words=("was killed before it could write",),
                never=(r"(?m)^lost node", "node_failure"),
            ),
        ),
        "called crashed, and a lost batch host",
    ),
    Injection(
        "port-taken",
        "another program listens on the port of the rendezvous",
        port_taken,
        (FINISHED,),
        "named, not avoided",
        "shared",
    ),
    Injection(
        "two-nodes-killed",
        "two nodes of four lose power at once",
        two_nodes_killed,
        (Truth(None, ("NODE_FAIL",), words=("node_failure",), advice=AGAIN, never=HARM),),
        is_own=True,
    ),
    Injection(
        "node-crashed",
        "a node crashes and closes its connections; the other ranks fail before Slurm notices",
        node_crashed,
        (Truth(1, ("FAILED", "NODE_FAIL"), ("node_failure",), node_index=1, advice=AGAIN, never=HARM),),
        is_own=True,
        needs_torch=True,
    ),
    Injection(
        "cancelled-pending",
        "a job is cancelled before it has started",
        cancelled_while_pending,
        (Truth(states=("CANCELLED",), never=(*HARM, "died", "killed", r"(?m)^lost node")),),
        is_own=True,
    ),
    Injection("drained", "a node of a healthy job is drained", drained, (RUNS,), is_own=True),
    Injection(
        "suspended",
        "an administrator suspends the job",
        suspended,
        (Truth(states=("SUSPENDED",), words=("SUSPENDED",), never=HEALTHY),),
        is_own=True,
    ),
    Injection(
        "requeued",
        "a person requeues a healthy job",
        requeued_by_hand,
        (Truth(states=("PENDING",), never=HEALTHY), RUNS),
        is_own=True,
    ),
    Injection(
        "chain",
        "`bsl train` under a time limit of a minute, with `slurm.chain`",
        chained,
        (FINISHED,),
        is_own=True,
        needs_torch=True,
    ),
)
