"""The section `slurm` of a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from bigsci_launch.config.schema.node import ResourceLimits, StageIn
from bigsci_launch.config.schema.options import SbatchOptions
from bigsci_launch.config.schema.section import Section
from bigsci_launch.config.schema.values import SlurmDuration, Word


class ChainSection(Section):
    """How a run starts itself again until it is finished: after its time limit, a preemption, a lost node or a crash.

    It stops after a start that got no further than those before it. A local site ignores this section.
    `chain: 3` is short for `{by: queue, links: 3}`."""

    by: Literal["requeue", "queue"]
    """`requeue`: the job script requeues its own job (`scontrol requeue`). `queue`: other jobs wait behind the running
    one; it suits sites that refuse requeues, and queues where waiting early pays."""

    links: PositiveInt = 1
    """Jobs that wait behind the running one, for `by: queue`. With several, a queue of days is waited for in advance,
    and a start that cannot submit another does not end the chain."""

    max_starts: PositiveInt = 50
    """Maximum number of starts of one chain, including the first."""

    max_hours: PositiveFloat | None = None
    """No start begins later than this many hours after the first of the chain; default: no limit."""

    @model_validator(mode="after")
    def _links_need_a_queue(self) -> ChainSection:
        if self.links > 1 and self.by != "queue":
            raise ValueError("`links` needs `by: queue`: a job that requeues itself has nothing behind it")
        return self


def _chain_of_links(value: Any) -> Any:
    return {"by": "queue", "links": value} if isinstance(value, int) and not isinstance(value, bool) else value


def _or_links(schema: dict[str, Any]) -> None:
    schema["anyOf"].insert(0, {"type": "integer", "exclusiveMinimum": 0})


class SlurmSection(Section):
    """What the job requests from the scheduler. If a key is left out, the site's value applies."""

    site: str = "local"
    """Name of a site file (`bsl config sites` lists them), or a path to one, relative to the run file."""

    nodes: PositiveInt = 1
    """Number of nodes. It has no effect on a local site."""

    ranks_per_task: PositiveInt = 1
    """Number of ranks that each task starts. More than 1: `run.command` is a launcher such as torchrun, one for each
    task, whose workers are the ranks. On a node there are `ranks_per_node` / `ranks_per_task` of them."""

    spare_nodes: NonNegativeInt = 0
    """Nodes that the job gets in addition to `nodes`, for `survive`: they wait to take the place of a lost one."""

    time_limit: SlurmDuration | None = None
    """Longest time of one job, HH:MM:SS or D-HH:MM:SS."""

    partition: Word | None = None
    """Partition; default: the site's default partition."""

    account: Word | None = None
    """Account to charge."""

    qos: Word | None = None
    """Quality of service."""

    reservation: Word | None = None
    """Reservation to run in."""

    constraint: Word | None = None
    """Node features that are required."""

    exclude: Word | None = None
    """Nodes that must not be used, as a Slurm hostlist."""

    nodelist: Word | None = None
    """Nodes that must be used, as a Slurm hostlist."""

    requeue: bool | Literal["expedite"] = False
    """Whether the job is started again after a lost node or a preemption (`--requeue`). `chain` does more. `expedite`:
    it starts at once and before all other jobs of the cluster, also as a `chain` by requeue; for Slurm 25.11 or newer,
    where the site allows it (`enable_expedited_requeue`)."""

    dependency: Word | None = None
    """Jobs that must end first, such as `afterok:123` (`sbatch --dependency`)."""

    chain: Annotated[ChainSection | None, BeforeValidator(_chain_of_links), Field(json_schema_extra=_or_links)] = None
    """How the run starts itself again until it is finished; default: it does not, and is submitted again by hand."""

    wait_s: NonNegativeInt = 60
    """Seconds that ranks may run after the first has ended with 0 (`srun --wait`); 0: no limit. Then they are killed as
    hung: raise it if a rank has long work to do after the others, such as a last upload."""

    node_check: bool = False
    """Whether each node is tested for some seconds before the ranks start: its GPUs, memory, shared memory and network.
    A node that fails ends the job with its name, and is left out of later attempts."""

    sbatch_options: SbatchOptions = []
    """Additional sbatch options of this run, such as `--mail-type=END`, `--begin=18:00` or `--licenses=scratch`. One
    with the same name as an option of the site replaces it."""

    container_image: str | None = None
    """Image of this run, on a site whose ranks run in a container; default: the site's."""

    ulimits: ResourceLimits = ResourceLimits()
    """Resource limits of the ranks; default: the site's."""

    stage_in: list[StageIn] = []
    """Files that are copied to every node before the ranks start (`sbcast`); default: the site's."""
