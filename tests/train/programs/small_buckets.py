"""Like `several`, but gradients are sent in buckets of a few weights, and each rank says when they are.

A rank writes a line for each bucket into `buckets-RANK.jsonl` of the attempt: the step, and the number of gradients
that its last backward pass had not made yet. In the run `spoiled`, rank 1 sends zeros from step 4 on.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import several
import torch

FEW_ELEMENTS = 3000
SPOILED_FROM = 4


def say_when() -> None:
    from bigsci_launch.train import loop
    from bigsci_launch.train.parallel import reduction

    reduction.BUCKET_ELEMENTS = FEW_ELEMENTS
    step, send = loop._step, reduction.GradientBucket.send
    now: dict[str, Any] = {}

    def run(training: Any, progress: Any) -> Any:
        setup = training.setup
        now.update(step=progress.step + 1, path=setup.identity.attempt.path, name=setup.config.run.name)
        return step(training, progress)

    def noted(bucket: Any) -> None:
        later = sum(each.num_missing for each in bucket.all_buckets)
        with Path(now["path"], f"buckets-{os.environ['RANK']}.jsonl").open("a") as file:
            print(json.dumps({"step": now["step"], "missing": later}), file=file)
        is_spoiled = now["name"] == "spoiled" and os.environ["RANK"] == "1" and now["step"] >= SPOILED_FROM
        kept = bucket._gradients
        if is_spoiled:
            bucket._gradients = [torch.zeros_like(each) for each in kept]
        send(bucket)
        bucket._gradients = kept

    add = reduction.OverlappedReduction._cut

    def cut(overlapped: Any, order: Any) -> None:
        add(overlapped, order)
        for each in overlapped._buckets:
            each.all_buckets = overlapped._buckets

    loop._step, reduction.GradientBucket.send = run, noted  # type: ignore[method-assign]
    reduction.OverlappedReduction._cut = cut  # type: ignore[method-assign]


if __name__ == "__main__":
    several.main(say_when)
