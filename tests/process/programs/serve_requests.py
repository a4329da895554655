"""A watcher that does nothing but serve what people ask of a run: `serve_requests.py RUN GRACE_S [ROUNDS]`.

It writes a heartbeat, and ends when the attempt is over, or is killed after ROUNDS. Its clock is five times as fast.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from bigsci_launch.errors import BslError
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.signs import find_last_step, read_rank_events
from bigsci_launch.runs.watching.heartbeat import Health, own_heartbeat, write_heartbeat
from bigsci_launch.spy.answer import answer_from, store_evidence
from bigsci_launch.spy.look.collect import collect
from bigsci_launch.spy.look.target import find_target
from bigsci_launch.watch.act.jobs import how_ended
from bigsci_launch.watch.act.request_handler import RequestHandler

EVERY_S = 0.2


def take_bundle(run: RunDir) -> tuple[Path | None, str]:
    try:
        target = find_target(str(run.path), None)
        found = collect(target)
        answer = answer_from(found)
        folder = target.evidence_folder(time.time())
        store_evidence(folder, found, answer)
    except BslError as error:
        return None, error.message
    return folder, answer.conclusion.claim


def main() -> None:
    run, grace_s = RunDir(Path(sys.argv[1]).resolve()), float(sys.argv[2])
    rounds_left = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    handler = RequestHandler(run, "agent", lambda: take_bundle(run), lambda: 5 * time.monotonic())
    while True:
        attempt = run.latest_attempt()
        ended = attempt is None or how_ended(attempt)
        name = attempt.name if attempt else None
        sign = {"every_s": EVERY_S, "health": Health.HEALTHY, "sentence": "serves", "attempt": name, "may_act": False}
        write_heartbeat(run, own_heartbeat("agent", **sign))
        step = find_last_step(attempt, read_rank_events(attempt)) if attempt else None
        for act in handler.serve(time.time(), step.step if step else None, grace_s):
            print(act.key, act.what, act.state, act.stage, act.words, flush=True)
        rounds_left -= 1
        if rounds_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if ended:
            return
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
