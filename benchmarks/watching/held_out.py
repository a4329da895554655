"""Published logs in the formats of other programs, and other seeds. Nothing was tuned to them: they were run once.

Each is as it was published, cut to the columns that matter, with the seconds that it gives or that its source says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from watching.simulation import Event, Tale

HANG_S = 2 * 3600.0
"""After its last line, each log is silent for so long: what is said of that."""


@dataclass(frozen=True, slots=True)
class Published:
    """A published log. `num_steps` is how many steps a person reads in it."""

    source: str
    what: str
    num_steps: int
    make: Callable[[], Tale]


def _tale(lines: list[tuple[float, str]]) -> Tale:
    """Lines with the seconds since the one before. The hang begins with the last."""
    now, events = 60.0, []
    for seconds, line in lines:
        now += seconds
        events.append(Event(now, f"{line}\n"))
    return Tale("", events, now + HANG_S, now)


# step, loss, norm of the gradient: 8 GPUs, a mixture of experts, "training remains stable"
BF16 = """1 12.3430 192.8154|10 11.6710 585.2727|20 10.5757 327.2692|30 10.0417 115.0629|40 9.3846 473.7863
50 8.8403 54.3825|60 8.2782 16.9639|70 7.9111 28.2059|80 7.7636 12.3717|90 7.8360 21.4122|100 7.8120 4.5645
110 7.6934 8.6194|120 7.6188 6.4448|130 7.6708 6.8947|140 7.5647 14.0279|150 7.5816 16.5601|160 7.5194 3.1803
170 7.4050 1.8129|180 7.5820 5.1845|190 7.3799 4.1170|200 7.2701 6.8444"""
NVFP4 = """1 12.3435 343.772|10 11.7380 206.888|20 10.5855 35333.01|30 10.0418 62.7358|40 9.4030 49.0843
50 8.8292 1513.939|60 8.2849 60.2146|70 7.9172 14.3719|80 7.7788 46.5989|90 7.8584 42.0544|100 7.8350 19.0194
110 7.7391 4.0108|120 7.6933 1.5168|130 7.7567 3.2053|140 7.6988 1.4630|150 7.7576 1.4027|160 7.7350 1.3798
170 7.6694 1.1640|180 7.8404 1.9457|190 7.6871 1.9864|200 7.6262 11.5088"""


def moonlight(rows: str, seconds: float) -> Tale:
    """`step:` lines of every tenth step, without times."""
    lines = []
    for row in rows.replace("\n", "|").split("|"):
        step, loss, norm = row.split()
        line = f"step: {step:>3}  loss: {float(loss):7.4f}  grad_norm: {norm:>8}  memory: 137.87GiB  tps: 14,873"
        lines.append((10 * seconds, line))
    return _tale(lines)


def nanotron() -> Tale:
    """huggingface/nanotron#390."""
    rows = (
        ("31:56", 327281, 2.38, 1.25),
        ("32:07", 327282, 2.35, 1.22),
        ("32:19", 327283, 2.51, 1.21),
        ("32:30", 327284, 2.36, 1.18),
    )
    head = "10/17/2025 16:{} [INFO|DP=0|PP=0|TP=0]: iteration: {} / 378950 | consumed_tokens: 85.8G | "
    rest = "elapsed_time_per_iteration_ms: 11.5K | global_batch_size: 64 | lm_loss: {} | lr: 1e-05 | grad_norm: {}"
    return _tale([(11.5, head.format(at, step) + rest.format(loss, norm)) for at, step, loss, norm in rows])


def llm_c() -> Tale:
    """anthonix/llm.c#2: the loss is no number."""
    times = (36.66, 36.47, 36.53, 36.59, 36.71, 36.61, 36.45, 36.69, 36.68, 36.63, 36.59, 36.81)
    line = (
        "step {:4}/74 | loss     nan (+nanz)| norm    nan (+nanz)| lr 3.00e-04 | {} ms | 9.2% bf16 MFU | 112021 tok/s"
    )
    return _tale([(ms / 1000, line.format(47 + at, ms)) for at, ms in enumerate(times)])


def gradient_is_no_number() -> Tale:
    """bigscience-workshop/Megatron-DeepSpeed#396: no loss at all, and a gradient that is no number."""
    line = (
        " iteration {:8}/  250000 | consumed samples: {:12} | elapsed time per iteration (ms): {} | "
        "learning rate: 2.999E-04 | global batch size:     8 | loss scale: 1.0 | grad norm: nan | "
        "actual seqlen:  2048 | number of skipped iterations:   0 | number of nan iterations:   0 | TFLOPs: 78.36 |"
    )
    rows = ((5426, 4247.9), (5427, 4225.8), (5428, 4229.2))
    return _tale([(ms / 1000, line.format(step, 8 * step, ms)) for step, ms in rows])


def deepspeed_lines() -> Tale:
    """argonne-lcf/Megatron-DeepSpeed on two nodes: lines of DeepSpeed around those of Megatron."""
    chatter = (
        "[2024-04-04 09:09:53,313] [INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | fwd: 6567.66 | bwd: 17950.35 | "
        "bwd_inner: 17711.19 | bwd_allreduce: 239.11 | step: 1139.29"
    )
    line = (
        " iteration {:8}/  317892 | consumed samples: {:12} | elapsed time per iteration (ms): {} | learning rate: "
        "3.000E-04 | global batch size:    96 | lm loss: {} | loss scale: 1.0 | actual seqlen:  4096 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | TFLOPs: 38.61 |"
    )
    rows = ((1, 25849.1, "1.117136E+01"), (2, 20298.3, "2.537718E+01"))
    return _tale(
        [
            each
            for step, ms, loss in rows
            for each in ((ms / 1000, chatter), (0, line.format(step, 96 * step, ms, loss)))
        ]
    )


def trainer_reports() -> Tale:
    """Reports of Hugging Face's Trainer without a progress bar between them, and an evaluation."""
    rows = ((0.116, 0.0213, 2.86), (0.1197, 0.0177, 2.9), (0.1247, 0.0201, 2.94), (0.1216, 0.0175, 2.97))
    lines = [
        (2.0, f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 5.5e-06, 'epoch': {epoch}}}")
        for loss, norm, epoch in rows
    ]
    lines.append((6.5, "{'eval_loss': 0.1311730146408081, 'eval_runtime': 6.5201, 'epoch': 3.0}"))
    lines.append((0.1, "{'train_runtime': 225.3153, 'train_loss': 0.11015076910438013, 'epoch': 3.0}"))
    return _tale(lines)


def stuck_bert() -> Tale:
    """NVIDIA/nccl#743: Megatron-LM's BERT, a line for every tenth step, then stuck."""
    head = " iteration {:8}/ 1000000 | consumed samples: {:12} | elapsed time per iteration (ms): {} | learning rate: "
    first = head.format(10, 40, 356.2) + (
        "0.000E+00 | global batch size:     4 | loss scale: 8388608.0 | number of skipped iterations:  10 | "
        "number of nan iterations:   0 |"
    )
    second = head.format(20, 80, 140.6) + (
        "2.020E-08 | global batch size:     4 | lm loss: 1.005022E+01 | sop loss: 8.174902E-01 | loss scale: 32768.0 | "
        "grad norm: 217.199 | number of skipped iterations:   8 | number of nan iterations:   0 |"
    )
    return _tale([(3.6, first), (0, "time (ms) | forward-compute: 193.77 | optimizer: 63.01"), (1.4, second)])


PUBLISHED = (
    Published(
        "a mixture of experts in bf16",
        "`step: 10  loss: 11.67  grad_norm: ...`, no times",
        21,
        lambda: moonlight(BF16, 2.1),
    ),
    Published("the same in NVFP4, gradients up to 35333", "the same", 21, lambda: moonlight(NVFP4, 2.35)),
    Published("huggingface/nanotron#390", "`iteration: 327281 / 378950`", 4, nanotron),
    Published("anthonix/llm.c#2, loss NaN", "`step   47/74 | loss     nan`", 12, llm_c),
    Published(
        "bigscience-workshop/Megatron-DeepSpeed#396, gradient NaN",
        "Megatron-DeepSpeed, no loss",
        3,
        gradient_is_no_number,
    ),
    Published("argonne-lcf/Megatron-DeepSpeed", "Megatron-DeepSpeed between lines of DeepSpeed", 2, deepspeed_lines),
    Published(
        "a hyperparameter search with Hugging Face's Trainer", "reports without numbers of steps", 4, trainer_reports
    ),
    Published("NVIDIA/nccl#743, stuck", "Megatron-LM's BERT, every tenth step", 2, stuck_bert),
)
SEEDS = range(100, 106)
