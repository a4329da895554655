"""The section `monitor` of a run file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from bigsci_launch.config.schema.notify import NotifySection
from bigsci_launch.config.schema.section import Section
from bigsci_launch.config.schema.trace import TraceSection
from bigsci_launch.step_lines import own_form


def _step_pattern(pattern: str) -> str:
    own_form(pattern)
    return pattern


StepPattern = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_step_pattern)]


class MetricsSection(Section):
    """Where the metrics of a run go while it runs: `bsl metrics RUN` prints the same ones."""

    file: str | None = None
    """A file `*.prom`, or a folder for one of each run, on the node that runs the job script: the folder that the
    textfile collector of its node_exporter reads. It is replaced every 15 s."""

    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """A port on that node at which OpenMetrics are read over HTTP, by whoever sends the token in `export/token` of the
    run directory (`Authorization: Bearer ...`)."""

    otlp: str | None = None
    """A URL to which they are sent every 15 s as OTLP over HTTP, such as `http://collector:4318/v1/metrics`. Headers
    with a key, and certificates, are in OpenTelemetry's own variables, such as `OTEL_EXPORTER_OTLP_HEADERS`."""


TRACKER_PACKAGES = ("tensorboard", "trackio", "wandb", "mlflow")
"""The trackers that `bsl` knows by itself; each needs the package of its name."""
TRACKER_GROUP = "bigsci_launch.trackers"
"""Another one is an entry point in this group."""

TrackerName = Annotated[str, Field(pattern="^[a-z][a-z0-9_-]{0,39}$")]


class MonitorSection(Section):
    """What the run records, and when."""

    peak_tflops_per_rank: PositiveFloat | None = None
    """Peak TFLOP/s of one rank's device, used to show utilisation; default: the site's."""

    dump_weights_steps: list[PositiveInt] = []
    """Steps before and after which every rank dumps its weights for `bsl diff-weights`."""

    exit_margin_s: PositiveInt | None = None
    """Seconds before the time limit at which ranks are asked to save and stop (`--signal`); default: computed."""

    ring: str = Field(default="auto", pattern="^(auto|none|/[^,:]*)$")
    """Where each rank keeps its last calls of torch.distributed, for `bsl spy` and `bsl trace last`: a folder on
    storage of the node, `auto` to find one, or `none`. An import hook on PYTHONPATH records them, 1 MiB a rank."""

    trace: TraceSection | None = None
    """The call trace of every rank; default: none. It needs `monitor.ring`. A trace takes 1.5 MiB a rank, and 1 MiB for
    each further thread. It is copied into the attempt when the rank ends."""

    step_line: StepPattern | None = None
    """How the program prints a step, if in no form that `bsl` knows: a regular expression that is searched in each
    line, such as `step=(?P<step>\\d+) loss=(?P<loss>\\S+)`. It has the group `step`, or `index` for steps counted from
    0, and what else is printed: `total`, `loss`, `grad_norm`, `seconds` or `milliseconds`, `batch_size`. No other
    lines then count as steps."""

    watch: Literal["auto", "off", "observe", "act"] = "auto"
    """Whether the job script starts `bsl watch` next to the ranks. `observe`: it detects and explains hangs and
    spikes, keeps evidence and notifies. `act`: it also ends ranks that hang, so that the run continues, leaves out the
    node of the suspect, and pins checkpoints around a spike; with `survive`, it fences the rank to blame for a hang.
    `auto`: `act` with `survive`; else `observe` for `bsl train`, and `off` for other programs."""

    notify: NotifySection | None = None
    """Who receives messages about what watchers find and do; default: no messages."""

    metrics: MetricsSection | None = None
    """Where metrics of the run go; default: nowhere."""

    trackers: list[TrackerName] = []
    """Experiment trackers that get the run as one run over all its attempts: `tensorboard`, `trackio`, `wandb`,
    `mlflow`, or the name of an entry point in the group `bigsci_launch.trackers`."""

    save_time_s: PositiveFloat = 60.0
    """Expected seconds of one save; part of the exit margin."""

    eval_interval: PositiveInt | None = None
    """Steps between evaluations; default: no evaluation. `bsl train` evaluates on `data.held_out`. If the step also has
    a save, that comes first."""

    eval_batches: PositiveInt = 4
    """Global batches per evaluation of `bsl train`. The samples are the same each time."""

    eval_time_s: NonNegativeFloat = 0.0
    """Expected seconds of one evaluation."""

    step_time_s: PositiveFloat = 120.0
    """Expected seconds of one step; part of the exit margin."""
