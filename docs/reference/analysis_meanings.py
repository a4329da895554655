"""Fields that `bsl spy`, `diff-weights`, `plan` and `hang-lab` print. The form is that of meanings.py."""

from __future__ import annotations

ANALYSES = {
    "bsl spy --json": """
schema_version | 1
job | name of the run, or Slurm's job id
world_size | ranks in all
coverage.ranks_read | number of ranks whose stacks were read
coverage.ranks_unreadable | list of {rank, node, why}
coverage.nodes_silent | list of {node, why}
coverage.numbering | whether the numbers of the ranks are `known`, `partly known` or `guessed`
coverage.steps_left_out[] | job steps that are not the training, such as a monitor, and how to look at them
coverage.problems | what could not be done on the nodes
ranks[].rank | its number; an index in this document only, if `numbered_by` is `order of start`
ranks[].name | what to call it: `rank 3`, or `process 4711` if its number is not known
ranks[].node | its node
ranks[].pid | its process, or null
ranks[].numbered_by | what says which rank it is, such as `environment`; `order of start` if nothing does
others[] | {node, pid, comm, role, why}: processes that are no ranks; role: `launcher`, `helper`, `ended`, `unknown`
verdict.state | `hang`, `waiting`, `slow`, `progressing`, `crashed`, `finished` or `unknown`
verdict.class | class of the hang, such as `H01` ([classes](../how-to/hang-lab.md#the-names))
verdict.signature | name of the [known hang](../how-to/add-a-signature.md) that it matches, or null
verdict.suspects[] | {rank, node, pid, numbered_by, coordinate, children, why}; children: workers; empty: none accused
verdict.sides[] | {ranks, where}: who waits where
verdict.look_first[] | like suspects, with reason and hit_rate: where to look, in order; accuses none of them
verdict.confidence | 0 to 1: how often verdicts that rest on as much were right
verdict.claim | the answer, in one sentence; after one look it begins with `if this job hangs:`
verdict.evidence | what supports it
verdict.missing | evidence that could not be had
verdict.next | commands to type next
classes[].ranks | ranks with equal stacks
classes[].nodes | their nodes
classes[].thread | the thread whose stack this is
classes[].frames[] | {function, file, line}, innermost first
rules? | list of {rule, looks_for, matches, decides, beaten_by, claim}: every rule, with `--why`
""",
    "bsl diff-weights --json": """
schema_version | 1
a | first argument, or that of `--audit`; null if only logs were given
b | second argument, or that of `--audit`; null if only logs were given
equal | whether all tensors and values are equal, within `--tolerance`, and all was read
compared | number of tensors on both sides
within_tolerance | number of those that differ, but not by more than `--tolerance`
different[].tensor | name of the tensor
different[].role | `weight`, a part of the optimizer's state (`fp32`, `exp_avg`, `exp_avg_sq`), or `other`
different[].a | {file, dtype, shape}; null if A lacks the tensor
different[].b | {file, dtype, shape}; null if B lacks the tensor
different[].coordinate | {pp, tp, dp}: an axis is null if the file holds all its indices; null if none is known
different[].kind | `value`, `bits`, `shape`, `dtype`, `nan`, `missing` in B, or `extra` in B
different[].max_abs | largest difference; null if it is infinite, as are other numbers
different[].rel_l2 | norm of the difference divided by the norm of A
different[].max_ulp | largest number of representable values between two elements
different[].fraction | fraction of the elements that differ
different[].first_at | index of the first element that differs, in the tensor that was compared
different[].worst_at | index of the element with the largest difference
different[].likely | likely explanation of the difference
different[].relation | in an audit, how the two copies are related
findings[] | {pattern, tensors, coordinates, claim}: what the differences have in common
values_compared | number of values on both sides: numbers, texts and states that are no tensors
values | list of {value, coordinate, a, b}: values that differ; a and b are {file, text}, null on a side that lacks it
components[].component | part of a checkpoint: `weights`, `optimizer` and others; the list is empty if there is only one
components[].compared | number of its tensors on both sides
components[].values_compared | number of its values on both sides
components[].different | number of its tensors that differ, or that only one side has
components[].values_different | number of its values that differ, or that only one side has
components[].not_read | number of its entries that cannot be compared
components[].unreadable | number of its files that cannot be read
not_read | list of {entry, type, file, why}: entries that cannot be compared
unreadable | list of {file, why}
notes | further remarks
bytes | {compared, read, by_digest}: bytes of A's tensors; those read, and those known by their digests
sample | whether only a sample was read (`--sample`)
seam | the loss at the restart, if logs were given; its `verdict` is spike, other loss, equal, no jump or unknown
""",
    "bsl plan --json": """
schema_version | 1
run | name of the run
site | name of the site
world_size | ranks of the configured layout
num_steps | steps of the whole run
num_tokens | tokens of the whole run
num_parameters | parameters of the model
padded_vocab_size | vocabulary size after padding
checkpoint_bytes | size of a checkpoint
refusal | why the configured layout is refused; null if it is not
program_needed | why `bsl train` cannot run what is planned; null if it can, or another program is planned
stages[].stage | number of a stage of the configured layout
stages[].layers[] | class names of its layers, in order
stages[].num_transformer_layers | how many of them are transformer layers
stages[].parameters_per_rank | parameters that one of its ranks holds
stages[].state_bytes_per_rank | bytes of weights, gradients and optimizer state of such a rank
stages[].micro_batch_milliseconds | predicted milliseconds of a micro batch, or null without a GPU
stages[].need_gib | GiB that a rank needs, or null without a GPU
calibration.is_measured | whether it was fitted to measurements. Absent on a site without GPUs, as are all fields below
calibration.num_timed_runs | number of timed runs
calibration.site | where the rows of the calibration were measured; null if it is not known
calibration.framework | with which framework; null if with several
calibration.attention | fused or unfused; null if both
calibration.differences[] | in what they differ from what is asked; then every band is the uncalibrated one
calibration.assumed[] | figures of the hardware that were not given
calibration.mean_left_out_error | mean relative error of the runs, each predicted from all others
calibration.constants | the fitted constants, by name
calibration.drift_from | day on which a drift begins
calibration.gpu | GPU that it describes
calibration.assumed | figures of the GPU and the network that were not given
configured | the layout of the run file; fields as under `plans`
rank_of_configured | its place among all plans
num_plans | plans that fit
plans[].nodes | number of nodes
plans[].tp | tensor-parallel size
plans[].pp | pipeline-parallel size
plans[].dp | data-parallel size
plans[].micro_batch_size | samples of a micro batch
plans[].partition_method | how layers are cut into stages
plans[].num_layers | transformer layers
plans[].num_attention_heads | attention heads
plans[].layers_per_stage | transformer layers of each stage
plans[].seconds_per_step | predicted time of a step
plans[].seconds_low | lower end of its band
plans[].seconds_high | upper end of its band
plans[].tokens_per_second_per_gpu | tokens that a GPU trains in a second
plans[].mfu | model FLOPs as a share of the GPU's dense peak in the run's precision; null if that peak is not known
plans[].model_tflops | TFLOP/s of a GPU that the model needs: attention and head, nothing that is recomputed
plans[].hardware_tflops | TFLOP/s of a GPU that are computed, with what is recomputed
plans[].tflops | {full, weights}: hardware TFLOP/s with and without attention and head
plans[].memory_gib | {first, middle, last, need, gpu}: nvidia-smi's figure for each stage; what must fit; what there is
plans[].fit | `fits`, `tight`, `doubtful` or `does not fit`
plans[].out_of_memory | whether it does not fit
plans[].bubble | fraction of a step in which the slowest stage waits
plans[].terms | seconds of a step by cause
plans[].days | days to the end of the run
plans[].likely_days | days within which three of four such plans finish
plans[].gpu_hours | GPU-hours of the whole run
plans[].checkpoint_bytes | size of a checkpoint
plans[].advice | what would make it better
survive | what `survive` costs and gives: {copies_gib, node_memory_gib, spare_nodes, hours_per_day_with_spares, \
hours_per_day_without, pause_s, node_mtbf_h}; null for a run without it
variation | keys of the run file that would make the best plan faster, as `set`, with that plan; null if none are found
num_doubtful | plans whose need exceeds the memory by less than the error of the estimate
doubtful | the best of these; fields as under `plans`
num_out_of_memory | plans that do not fit
out_of_memory | the best of them; fields as under `plans`
refused[] | {rule, count, example, source}: layouts that a rule refused
""",
    "bsl plan --survive --json": """
schema_version | 1
run | name of the run
site | name of the site
num_nodes | nodes of the run
failures | f: nodes that may fail at the same time without any state being lost
fewest_nodes_of_a_replica | n0: nodes that hold one of f + 1 replicas
guaranteed_nodes | (f + 1) n0: f is kept while so many nodes are left
sufficient_sizes | sizes of templates, in nodes, that suffice from there on
templates[].fewest_replicas | how many pipelines there must be, so that it fits into memory
templates[].num_nodes | its nodes
templates[].layers_per_stage | transformer layers of each stage
templates[].is_needed | whether it is one of `sufficient_sizes`
templates[].micro_batch_seconds | what one more micro batch adds to a step of a full pipeline
templates[].need_gib | GiB that a GPU of the fullest stage needs
templates[].host_gib | GiB of host memory that a node needs for shards and copies, with f + 1 pipelines
on_nodes[].num_nodes | a number of nodes on which the run can continue, the largest first
on_nodes[].pipelines | list of {num_nodes, micro_batches}
on_nodes[].idle_nodes | nodes that no pipeline uses
on_nodes[].step_seconds | predicted time of a step
on_nodes[].samples_per_second | throughput
on_nodes[].failures_left | nodes that may fail at the same time after that
on_nodes[].whole_replicas | whole replicas of the configured layout on as many nodes
on_nodes[].whole_replicas_step_seconds | predicted time of their step; null if they do not fit
node_mtbf_h | mean hours between failures of one node; null if the site does not say
horizon_h | hours over which `expected` is computed: the time limit of the run, or 24
assumed_rebuild_s | seconds for new communicators, which are assumed
strategies[].strategy | `templates` or `whole replicas`
strategies[].expected | {effective_share, paused_share, stopped_share, num_losses}; null without `node_mtbf_h`
strategies[].trace | {samples, seconds, effective_share, paused_s, stopped_s, num_changes}; null without `--trace`
loss | what `--lose` does; null without it
loss.lost | the lost nodes
loss.means | `simple`, `borrow`, `merge` or `recompose`
loss.before | nodes of each pipeline before the loss
loss.after | nodes of each pipeline after it
loss.idle | nodes that no pipeline uses after it
loss.step_seconds_before | predicted time of a step before the loss
loss.step_seconds | predicted time of a step after it
loss.failures_left | nodes that may fail at the same time, once the copies are made
loss.transfer_seconds | how long the next step waits for what moves
loss.copies_seconds | how long the copies of shards take after that
loss.links | list of {source, target, bytes}: what moves before the next step
loss.copy_links | list of {source, target, bytes}: copies of shards
loss.lost_state | list of {unit, kind, bytes}: what only a checkpoint has; `kind` is `weights` or `state`
""",
    "bsl plan score --json": """
schema_version | 1
time | {num_rows, mean, median, p90}: error of seconds per step, in percent
ranking | {num_pairs, tau, tau_of_sections, num_sections, num_found, regret}: order inside sections
memory | {num_rows, mean, median, p90}: error of memory, in percent
oom | {num_oom, num_caught, num_fitting, num_false}: rows that ran out of memory, and rows predicted to
tflops_weights | {num_rows, mean, median, p90}: error against printed TFLOP/s without attention and head
tflops_full | {num_rows, mean, median, p90}: error against printed TFLOP/s with them
num_unpriced | rows without a prediction
""",
    "bsl plan check --json": """
schema_version | 1
run | name of the run
findings[].rule | the rule that reports it
findings[].severity | `error`, `warning` or `note`
findings[].key | the key that the rule is about
findings[].other_key | the other key involved
findings[].text | what is wrong, with the numbers
findings[].price | what it costs
""",
    "bsl hang-lab list --json": """
schema_version | 1
classes[].name | what `run` takes
classes[].class | its class
classes[].title | what it is
classes[].reproducible | whether it can be reproduced here
classes[].reason | why not; null if it can
classes[].family? | the family of the class
classes[].recipe? | name of the program's recipe; null if there is none
classes[].min_ranks? | smallest number of ranks
classes[].needs? | what it needs, such as root
classes[].is_hang? | whether it is a hang
classes[].states? | states that a right verdict may have
classes[].classes? | classes that a right verdict may have
classes[].accuses? | whether a rank is at fault
classes[].culprits? | which rank may be at fault: `any`, `rank 0`, `not rank 0`, or `no matter` which
""",
    "bsl hang-lab run --json": """
schema_version | 1
class | name of the reproduction
title | what it is
topology | layout of the ranks
culprit | the rank at fault
expected | the right verdict, in words
verdict | {state, class, suspects, look_first, confidence, claim}: what `bsl spy` said
judgement | `right`, `wrong accusation` or another [judgement](../how-to/hang-lab.md#the-judgement)
""",
    "bsl cluster status --json": """
schema_version | 1
directory | directory of the cluster
problem | why it cannot be used; null if it can
slurm_conf | its configuration
isolated | whether each node is a set of namespaces
gpus_per_node | GPUs of each node
nodes | list of {name, address, state, running}
""",
    "bsl data prepare --json": """
schema_version | 1
prefix | what `data.prefix` names
num_documents | documents written
num_tokens | tokens written
num_bytes | bytes of text read
vocab_size | tokens of the vocabulary
""",
}
