"""The HTML page of `bsl plan --survive`: self-contained, readable without a network, with SVG plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from bigsci_launch import pages
from bigsci_launch.charts import Marker, scatter, stairs
from bigsci_launch.plan.show import survival as words
from bigsci_launch.plan.show.page import STYLE, table
from bigsci_launch.plan.survive.answer import SurvivalAnswer
from bigsci_launch.plan.survive.survival import OnNodes, Survival

_KEY = (
    '<p class="soft"><span class="key" style="background:#2d7dd2"></span>pipelines of templates'
    '<span class="key" style="background:#8a94a0"></span>whole replicas of the configured layout; point at a mark for '
    "details</p>"
)


def render_survival(answer: SurvivalAnswer) -> str:
    survival = answer.survival
    every = [found for _, found in sorted(survival.by_nodes.items(), reverse=True)]
    parts = [
        f"<h1>{escape(answer.name)} on {escape(answer.site_name)}: lost nodes</h1>",
        *_paragraphs(words.head_lines(answer)),
        "<h2>Throughput by the nodes that are left</h2>",
        _KEY,
        _throughput(survival, every),
        *_expected(answer),
        *_loss(answer),
        *_trace(answer),
        "<h2>Templates</h2>",
        table(words.TEMPLATE_COLUMNS, words.template_cells(survival)),
        "<h2>Every number of nodes</h2>",
        table(words.NODES_COLUMNS, words.nodes_cells(survival, every)),
    ]
    return pages.render_page(f"bsl plan --survive: {answer.name}", STYLE, "\n".join(parts))


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    return (f"<p>{escape(line)}</p>" for line in lines)


def _throughput(survival: Survival, every: Iterable[OnNodes]) -> str:
    batch = survival.replica.setup.global_batch_size
    markers = []
    for found in every:
        if found.whole_seconds:
            title = f"{found.num_nodes} nodes: {found.num_whole} whole replicas, {found.whole_seconds:.1f} s a step"
            markers.append(Marker(found.num_nodes, batch / found.whole_seconds, "refused", "cross", title))
        sizes = words.describe_sizes(found.composition.sizes)
        title = f"{found.num_nodes} nodes: {sizes}, {found.seconds:.1f} s a step"
        markers.append(Marker(found.num_nodes, batch / found.seconds, "fits", "dot", title))
    guarantee = (float(survival.guaranteed_nodes), f"f {survival.failures} from here on")
    return scatter(markers, "nodes", "samples a second", limit=guarantee)


def _expected(answer: SurvivalAnswer) -> list[str]:
    parts = ["<h2>What to expect of one job</h2>", *_paragraphs(words.expected_lines(answer))]
    if answer.node_mtbf_h:
        parts.append(table(words.STRATEGY_COLUMNS, words.strategy_cells(answer)))
    return parts


def _loss(answer: SurvivalAnswer) -> list[str]:
    if answer.loss is None:
        return []
    return [
        "<h2>The loss</h2>",
        *_paragraphs(words.loss_lines(answer)),
        table(words.LOSS_COLUMNS, words.loss_cells(answer.loss)),
    ]


def _trace(answer: SurvivalAnswer) -> list[str]:
    trace = answer.trace
    if trace is None:
        return []
    rate = answer.survival.samples_per_second
    ends = trace.spans[-1].end / 3600
    nodes = [(span.begin / 3600, float(span.num_nodes)) for span in trace.spans]
    rates = [(span.begin / 3600, rate(span.num_nodes)) for span in trace.spans]
    return [
        "<h2>The trace</h2>",
        *_paragraphs(words.trace_lines(answer)),
        stairs([*nodes, (ends, nodes[-1][1])], "hours", "nodes", "batch"),
        stairs([*rates, (ends, rates[-1][1])], "hours", "samples a second, pauses apart", "speed"),
        table(words.REPLAY_COLUMNS, words.replay_cells(answer)),
    ]
