"""What calculon and llm-analysis predict for the published rows, as far as they can say them.

    python benchmarks/plan_peers.py --calculon FOLDER --llm-analysis PYTHON

Reads `benchmarks/rows/published/*.csv`, writes `benchmarks/rows/published-peers.csv`, and prints the errors by source.

- FOLDER holds github.com/calculon-ai/calculon and is named after its commit, as in `calculon-c02c5e9`. It needs
  `pip install psutil`. The package `calculon` on PyPI is another program.
- PYTHON is the interpreter of an environment with `pip install llm-analysis==0.2.2`.

Nothing is fitted. calculon gets its own system files and the execution that its own validation has for Megatron:
activations not fused, all-reduce, no overlap with tensor parallelism. llm-analysis gets its own GPUs and the
efficiency that it advises for training, 0.5. Eight of the nine rows of `korthikanti22` are what calculon's authors
validated it on, and those of `mtnlg` are an example of llm-analysis.

A row that a tool cannot say is left out, with the reason. Left out are also rows that do not say what a tool must know.
What remains approximate:

- calculon: bf16 is its float16. Embeddings and the head are not in it, whatever the vocabulary. ZeRO-1 and ZeRO-2 are
  one thing.
- llm-analysis: the time is that of the FLOPs, at any layout, schedule and micro batch. A SwiGLU of width 8/3 h is
  taken as its MLP of 4 h, which has the same FLOPs within 2 %. Memory stays empty unless the row says all that it
  depends on.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parent / "rows"
PROGRAMS = Path(__file__).parent / "planners"
HEADER = ("row_id", "tool", "version", "seconds", "memory_gib", "reason")
TIMEOUT_S = 600.0

GPUS_PER_NODE = 8
CALCULON_SYSTEMS = {"A100-SXM4-80GB": "a100_80g.json", "H100-SXM5-80GB": "h100_80g_nvl8.json"}
CALCULON_RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}
INSIDE, BETWEEN = 0, 1
"""Networks in calculon's system files: inside a node, between nodes."""

LLM_ANALYSIS_GPUS = {
    "A100-SXM4-40GB": "a100-sxm-40gb",
    "A100-SXM4-80GB": "a100-sxm-80gb",
    "H100-SXM5-80GB": "h100-sxm-80gb",
}
LLM_ANALYSIS_RECOMPUTE = {"none": 0, "selective": 1, "full": 2}
ADVISED_EFFICIENCY = 0.5
MATRICES = {"gelu": 2, "relu2": 2, "swiglu": 3}
MLP_FLOPS = 16
"""FLOPs of an MLP for a token, over h squared, in llm-analysis: it has no other."""
MLP_TOLERANCE = 0.02

MEGATRON = ("megatron", "deepspeed")
"""Frameworks in which selective recomputation is that of the attention core, as in both tools."""


class Unsayable(Exception):
    """The row does not say what the tool must know, or the tool cannot say what the row has."""


@dataclass(frozen=True)
class Row:
    """A published row, in which an empty cell is unknown."""

    cells: Mapping[str, str]

    def text(self, key: str) -> str:
        if not self.cells[key]:
            raise Unsayable(f"not published: {key}")
        return self.cells[key]

    def number(self, key: str) -> int:
        return int(self.text(key))

    def knows(self, *keys: str) -> bool:
        return all(self.cells[key] for key in keys)

    def one_of(self, key: str, allowed: Mapping[str, Any]) -> Any:
        if self.text(key) not in allowed:
            raise Unsayable(f"not in the tool: {key} {self.text(key)}")
        return allowed[self.text(key)]

    @property
    def head_dim(self) -> int:
        return self.number("head_dim") if self.knows("head_dim") else self.number("nhidden") // self.number("nheads")

    @property
    def kv_heads(self) -> int:
        return self.number("kv_heads" if self.knows("kv_heads") else "nheads")


@dataclass(frozen=True)
class Answer:
    """What a tool says about a row, or why it says nothing."""

    seconds: float | None = None
    memory_gib: float | None = None
    reason: str = ""


def check_common(row: Row) -> None:
    """Raise for rows that neither tool has words for."""
    if row.cells["notes"].startswith("NOT AN ITERATION"):
        raise Unsayable("not an iteration")
    if row.cells["notes"].startswith("REDIS"):
        raise Unsayable("not in the tool: stages of unequal size")
    if row.knows("experts"):
        raise Unsayable("not in the tool: experts as these rows have them")
    if row.number("cp") > 1:
        raise Unsayable("not in the tool: context parallelism")
    if row.cells["schedule"] == "zero_bubble":
        raise Unsayable("not in the tool: schedule zero_bubble")
    if row.text("precision") not in ("fp16", "bf16"):
        raise Unsayable(f"not in the tool: products alone in {row.text('precision')}")
    if row.text("recompute") == "selective" and row.text("framework") not in MEGATRON:
        raise Unsayable("not in the tool: selective recomputation of another kind than Megatron's")


def calculon_input(row: Row) -> dict[str, Any]:
    check_common(row)
    system = row.one_of("gpu", CALCULON_SYSTEMS)
    row.one_of("attention", {"unfused": True})
    row.one_of("activation", {"gelu": True})
    row.one_of("norm", {"layernorm": True})
    row.one_of("positions", {"learned": True})
    if row.kv_heads != row.number("nheads"):
        raise Unsayable("not in the tool: grouped-query attention")
    application = {
        "name": row.text("row_id"),
        "hidden": row.number("nhidden"),
        "feedforward": row.number("ffn"),
        "seq_size": row.number("seq"),
        "attn_heads": row.number("nheads"),
        "attn_size": row.head_dim,
        "num_blocks": row.number("nlayers"),
    }
    return {"system": system, "application": application, "execution": calculon_execution(row)}


def calculon_execution(row: Row) -> dict[str, Any]:
    tp, pp, dp = row.number("tp"), row.number("pp"), row.number("dp")
    has_sequence_parallel = tp > 1 and row.number("sequence_parallel") == 1
    zero = row.number("zero") if dp > 1 else 0
    if zero == 3:
        raise Unsayable("not in the tool: zero 3")
    recompute = row.one_of("recompute", CALCULON_RECOMPUTE)
    return {
        "num_procs": tp * pp * dp,
        "tensor_par": tp,
        "pipeline_par": pp,
        "data_par": dp,
        "tensor_par_net": INSIDE if tp <= GPUS_PER_NODE else BETWEEN,
        "pipeline_par_net": INSIDE if tp * pp * dp <= GPUS_PER_NODE else BETWEEN,
        "data_par_net": INSIDE if tp * dp <= GPUS_PER_NODE else BETWEEN,
        "batch_size": row.number("gbs"),
        "microbatch_size": row.number("mbs"),
        "datatype": "float16",
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": recompute,
        "pipeline_interleaving": row.number("virtual_stages") if pp > 1 else 1,
        "optimizer_sharding": zero in (1, 2),
        "tensor_par_comm_type": "rs_ag" if has_sequence_parallel else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": has_sequence_parallel and recompute != "full",
        "data_par_overlap": dp > 1 and "dp" in row.cells["overlap"].split(),
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def llm_analysis_input(row: Row) -> dict[str, Any]:
    check_common(row)
    width = row.number("nhidden")
    flops = 2 * row.one_of("activation", MATRICES) * row.number("ffn") / width
    if abs(flops / MLP_FLOPS - 1) > MLP_TOLERANCE:
        raise Unsayable("not in the tool: an MLP of other FLOPs than that of width 4 h")
    if row.head_dim * row.number("nheads") != width:
        raise Unsayable("not in the tool: head_dim")
    tp, mbs = row.number("tp"), row.number("mbs") if row.knows("mbs") else 1
    model = {
        "num_layers": row.number("nlayers"),
        "n_head": row.number("nheads"),
        "hidden_dim": width,
        "vocab_size": row.number("vocab"),
        "max_seq_len": row.number("seq"),
        "num_key_value_heads": row.kv_heads,
    }
    return {
        "model": model,
        "train": {
            "gpu_name": row.one_of("gpu", LLM_ANALYSIS_GPUS),
            "batch_size_per_gpu": mbs,
            "global_batch_size": row.number("gbs"),
            "seq_len": row.number("seq"),
            "activation_recomputation": row.one_of("recompute", LLM_ANALYSIS_RECOMPUTE),
            "ds_zero": int(row.cells["zero"] or 0),
            "dp_size": row.number("dp"),
            "tp_size": tp,
            "pp_size": row.number("pp"),
            "sp_size": tp if row.cells["sequence_parallel"] == "1" else 1,
            "flash_attn": row.cells["attention"] in ("fused", "triton"),
            "mlp_gated_linear_units": row.text("activation") == "swiglu",
            "flops_efficiency": ADVISED_EFFICIENCY,
        },
    }


def memory_is_sayable(row: Row) -> bool:
    """Return whether the row says all that llm-analysis's memory depends on: its heads are always tied."""
    is_known = row.knows("mbs", "attention", "zero") or (row.knows("mbs", "attention") and row.cells["dp"] == "1")
    return is_known and row.cells["tied"] == "1" and (row.cells["tp"] == "1" or row.knows("sequence_parallel"))


def ask(argv: Sequence[str | Path], inputs: Sequence[dict[str, Any]], **environment: str) -> Any:
    done = subprocess.run(
        [str(part) for part in argv],
        input=json.dumps(inputs),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return json.loads(done.stdout)


def ask_calculon(folder: Path, inputs: Sequence[dict[str, Any]]) -> tuple[str, list[Answer]]:
    argv = (sys.executable, PROGRAMS / "calculon_answers.py", folder)
    return folder.resolve().name, [Answer(**found) for found in ask(argv, inputs, PYTHONPATH=str(folder))]


def ask_llm_analysis(python: Path, inputs: Sequence[dict[str, Any]]) -> tuple[str, list[Answer]]:
    found = ask((python, PROGRAMS / "llm_analysis_answers.py"), inputs)
    return found["version"], [Answer(**one) for one in found["answers"]]


def answers_of(
    rows: Sequence[Row],
    say: Callable[[Row], dict[str, Any]],
    ask_tool: Callable[[Sequence[dict[str, Any]]], tuple[str, list[Answer]]],
) -> tuple[str, list[Answer]]:
    """Return the version of a tool and its answer for each row, asked at once for all rows that it can say."""
    answers: list[Answer | None] = []
    inputs = []
    for row in rows:
        try:
            inputs.append(say(row))
            answers.append(None)
        except Unsayable as error:
            answers.append(Answer(reason=str(error)))
    version, said = ask_tool(inputs)
    given = iter(said)
    return version, [next(given) if answer is None else answer for answer in answers]


def without_memory(row: Row, answer: Answer) -> Answer:
    return answer if memory_is_sayable(row) else Answer(answer.seconds, None, answer.reason)


def written(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def summary(tool: str, rows: Sequence[Row], answers: Sequence[Answer]) -> Iterator[str]:
    """Give a line for each source: rows said, mean of absolute errors and median of signed errors of the time."""
    sources: dict[str, list[float]] = {}
    for row, answer in zip(rows, answers, strict=True):
        errors = sources.setdefault(row.text("source"), [])
        if answer.seconds is not None and row.knows("sec_per_it"):
            errors.append(100 * (answer.seconds / float(row.text("sec_per_it")) - 1))
    for source, errors in sources.items():
        total = sum(row.cells["source"] == source for row in rows)
        figures = ""
        if errors:
            mean, median = statistics.fmean(map(abs, errors)), statistics.median(errors)
            figures = f", mean |error| {mean:.1f} %, median error {median:+.1f} %"
        yield f"{tool:13} {source:15} {len(errors)} of {total} rows{figures}"


def read_published() -> list[Row]:
    rows = []
    for path in sorted((ROWS / "published").glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows += [Row(cells) for cells in csv.DictReader(file)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calculon", type=Path, required=True, help="the folder of calculon, named after its commit")
    parser.add_argument("--llm-analysis", type=Path, required=True, help="the Python that has llm-analysis")
    options = parser.parse_args()
    rows = read_published()
    calculon, theirs = answers_of(rows, calculon_input, lambda inputs: ask_calculon(options.calculon, inputs))
    version, others = answers_of(
        rows, llm_analysis_input, lambda inputs: ask_llm_analysis(options.llm_analysis, inputs)
    )
    others = [without_memory(row, answer) for row, answer in zip(rows, others, strict=True)]
    with (ROWS / "published-peers.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for tool, said_by, answers in (("calculon", calculon, theirs), ("llm-analysis", version, others)):
            for row, answer in zip(rows, answers, strict=True):
                found = (written(answer.seconds), written(answer.memory_gib), answer.reason)
                writer.writerow((row.text("row_id"), tool, said_by, *found))
            print("\n".join(summary(tool, rows, answers)))


if __name__ == "__main__":
    main()
