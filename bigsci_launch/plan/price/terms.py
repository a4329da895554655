"""What the time of a step is spent on, in one order for work, for rates and for reports."""

from __future__ import annotations

from bigsci_launch.plan.price.constants import Constants

TERMS = (
    "matrix products",
    "attention",
    "launch overhead",
    "memory traffic",
    "NVLink",
    "network",
    "messages",
    "misaligned heads",
)

WorkByTerm = tuple[float, float, float, float, float, float, float, float]
"""Products and attention in seconds at the peak rate, launches in 1e-3 of the overhead of a layer, traffic in TB,
NVLink and network in GB, messages in 1e6 that wait for each other, misaligned attention in seconds at the peak rate."""

NO_WORK: WorkByTerm = (0.0,) * 8
LAUNCHES, NETWORK, MESSAGES = (TERMS.index(name) for name in ("launch overhead", "network", "messages"))


def work_of(
    products: float = 0.0,
    attention: float = 0.0,
    launches: float = 0.0,
    traffic: float = 0.0,
    nvlink: float = 0.0,
    network: float = 0.0,
    messages: float = 0.0,
    misaligned: float = 0.0,
) -> WorkByTerm:
    """Return work with these amounts; `launches` counts layers, `messages` those that wait for each other."""
    return (products, attention, launches / 1e3, traffic, nvlink, network, messages / 1e6, misaligned)


def add_work(one: WorkByTerm, other: WorkByTerm) -> WorkByTerm:
    a, b, c, d, e, f, g, h = (left + right for left, right in zip(one, other, strict=True))
    return (a, b, c, d, e, f, g, h)


def rates_of(constants: Constants) -> tuple[float, ...]:
    """Return the seconds per unit of work, in the order of `TERMS`."""
    return (
        1 / constants.gemm_efficiency,
        1 / constants.attention_efficiency,
        constants.layer_overhead_ms,
        1 / constants.hbm_tb_per_s,
        1 / constants.nvlink_gb_per_s,
        1 / constants.network_gb_per_s,
        constants.message_us,
        constants.misaligned_heads,
    )


def weigh_work(work: WorkByTerm, rates: tuple[float, ...]) -> float:
    """Return the seconds of work at these rates, one thing after the other."""
    return sum(map(float.__mul__, work, rates))
