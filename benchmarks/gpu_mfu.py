"""Measures what share of a GPU's peak `bsl train` uses, by model size, micro batch and recomputation.

    python benchmarks/gpu_mfu.py [--device auto|cuda|cpu] [--only REGEX] [--peak TFLOPS] [--page docs/how-to/gpu.md]

One rank trains each case for a few steps on random tokens; the first ones are left out, and the median of the others
counts. MFU is what `train/flops.py` calls so: no recomputation, attention over the whole square. The memory is the
peak of the rank. A case that runs out of memory says so. `--device cpu` trains tiny models, as a test of this program;
with `auto` and no GPU, it says why it measures nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from ranks import start_attempt

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.data.indexed import IndexedWriter
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import RunDir, read_json

BEGIN, END = "<!-- mfu -->", "<!-- /mfu -->"
WARM_UP, MEASURED = 4, 8
LIMIT_S = 240
PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "MI250X": 191.5, "MI300X": 1307.0}
"""Dense bf16 peak of one rank's device by a part of its name, TFLOP/s. A PCIe card of the name has less."""

COLUMNS = ("case", "parameters", "micro batch", "recomputes", "s per step", "tokens per s", "TFLOP/s", "MFU", "GiB")


@dataclass(frozen=True, slots=True)
class MfuCase:
    """A model and how it is trained on one rank; `micro_batches` of them make a step."""

    name: str
    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    micro_batch: int
    micro_batches: int = 8
    recomputes: bool = False
    precision: str = "bf16"


def _billion(micro_batch: int, **more: Any) -> MfuCase:
    name = f"1.3B mbs {micro_batch}{' recomputed' if more.get('recomputes') else ''}"
    return MfuCase(name, 24, 2048, 16, 2048, 50257, micro_batch, **more)


ON_GPU = (
    _billion(1),
    _billion(4),
    _billion(8),
    _billion(8, recomputes=True),
    MfuCase("350M mbs 8", 24, 1024, 16, 2048, 50257, 8),
    MfuCase("350M mbs 8 fp16", 24, 1024, 16, 2048, 50257, 8, precision="fp16"),
)
ON_CPU = (
    MfuCase("tiny", 2, 64, 4, 64, 512, 2, 2),
    MfuCase("tiny recomputed", 2, 64, 4, 64, 512, 2, 2, recomputes=True),
)


def config_of(case: MfuCase, device: str, prefix: Path, peak: float) -> RunConfig:
    """Return the run file of a case."""
    return RunConfig.model_validate(
        {
            "run": {"name": "mfu"},
            "model": {
                **{"num_layers": case.layers, "hidden_size": case.hidden, "num_attention_heads": case.heads},
                **{"sequence_length": case.length, "vocab_size": case.vocabulary},
            },
            "training": {
                **{"steps": WARM_UP + MEASURED, "micro_batch_size": case.micro_batch, "precision": case.precision},
                **{"global_batch_size": case.micro_batch * case.micro_batches, "device": device},
                **{"activation_checkpointing": case.recomputes},
            },
            "data": {"prefix": str(prefix)},
            "monitor": {"peak_tflops_per_rank": peak},
            # Guards cost less than 0.5 % of a run, but their first checks would be among these few steps.
            "guards": {"interval": "off"},
        }
    )


def prepare_tokens(prefix: Path, case: MfuCase) -> None:
    """Write random tokens that last for all steps."""
    draw = np.random.default_rng(0)
    count = case.length * case.micro_batch * case.micro_batches * 4 + 1
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_document(draw.integers(case.vocabulary, size=count))


def measure(case: MfuCase, device: str, peak: float, folder: Path) -> tuple[str, ...]:
    """Train one case and return its line of the table."""
    folder.mkdir()
    prefix = folder / "tokens"
    prepare_tokens(prefix, case)
    config = config_of(case, device, prefix, peak)
    attempt, (rank,) = start_attempt(RunDir(folder / "run"), config, 1)
    try:
        code = rank.wait(LIMIT_S)
    finally:
        rank.kill()
    start = (case.name, "", str(case.micro_batch), "yes" if case.recomputes else "no")
    if code != 0:
        error = attempt.error_file(0)
        said = read_json(error) if error.exists() else {"type": f"exit {code}", "message": ""}
        return (*start, said["type"], said["message"].split("\n")[0][:60], "", "", "")
    records = [record for record in read_events(attempt.event_file(0)) if record["kind"] == "step"][WARM_UP:]
    seconds = median(record["seconds"] for record in records)
    nearest = min(records, key=lambda record: abs(record["seconds"] - seconds))
    tokens = case.length * case.micro_batch * case.micro_batches
    memory = max(record.get("memory_allocated", 0) for record in records)
    size = 12 * case.layers * case.hidden**2 + case.vocabulary * case.hidden
    return (
        case.name,
        f"{size / 1e9:.2f}B" if size > 1e8 else f"{size / 1e6:.1f}M",
        *start[2:],
        f"{seconds:.3f}",
        f"{tokens / seconds:,.0f}",
        f"{nearest['tflops']:.1f}",
        f"{100 * nearest['utilization']:.1f} %",
        f"{memory / 2**30:.1f}" if memory else "unknown",
    )


def find_device(wanted: str) -> tuple[str, str]:
    """Return the device to measure and its name; an empty name means that there is nothing to measure."""
    import torch

    if wanted == "cpu":
        return "cpu", "CPU"
    return ("cuda", torch.cuda.get_device_name(0)) if torch.cuda.device_count() else ("cpu", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--only", default="", help="regular expression that names of cases must contain")
    parser.add_argument("--peak", type=float, help="dense peak of the device, TFLOP/s; default: by its name")
    parser.add_argument("--page", type=Path, help="file whose table, between markers, is replaced")
    arguments = parser.parse_args()
    device, name = find_device(arguments.device)
    if not name:
        said = "no GPU is visible to torch: nothing was measured"
        sys.exit(said) if arguments.device == "cuda" else print(said)
        return
    known = next((peak for part, peak in PEAKS.items() if part in name), None)
    peak = arguments.peak or (0.1 if device == "cpu" else known)
    if peak is None:
        sys.exit(f"the peak of {name} is not known: give it with --peak")
    cases = [case for case in (ON_CPU if device == "cpu" else ON_GPU) if re.search(arguments.only, case.name)]
    lines = [f"{name}, peak {peak:g} TFLOP/s", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    print(*lines, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(cases):
            lines.append(f"| {' | '.join(measure(case, device, peak, Path(scratch) / str(number)))} |")
            print(lines[-1], flush=True)
    if arguments.page:
        text = arguments.page.read_text()
        start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        arguments.page.write_text(f"{text[:start]}\n" + "\n".join(lines) + f"\n{text[end:]}")


if __name__ == "__main__":
    main()
