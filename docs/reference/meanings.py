"""Meanings of environment variables and of fields of JSON documents, for generated pages. Tests check them.

A line of a document is `path | meaning`. `[]` steps into a list. A meaning that begins with `{a, b}` names all fields
of the object at that path. An object without such a list and without lines of its own has names that depend on the
run. A path that ends with `?` may be absent.
"""

from __future__ import annotations

VARIABLES = {
    "BSL_RUNS": "Folder in which `bsl` looks up runs by name; default: `runs` in the current folder.",
    "BSL_PATH": "Folders, separated by colons: site files of your own in `sites/`, known hangs in `signatures/`, "
    "known code in `known/`.",
    "BSL_CLUSTER_DIR": "Directory of the cluster of `bsl cluster`; default: `~/.bsl-cluster`. Its path must be short.",
    "XDG_STATE_HOME": "`bsl spy` stores evidence of jobs without a run in its `bsl/spy/`; default: `~/.local/state`.",
    "BSL_DEBUG": "`1`: an error shows its traceback instead of one line.",
    "BSL_RUN_DIR": "Set for every rank: the run directory.",
    "BSL_ATTEMPT": "Set for every rank: the name of the attempt, such as `0001`.",
    "BSL_LAB_STAGE": "Set by `bsl hang-lab` for its ranks: the file system on which it reproduces a hang.",
    "BSL_LAB_NAMESPACES": "Set by `bsl hang-lab` for a rank: the namespaces that it enters.",
    "BSL_LAB_LINK": "Set by `bsl hang-lab` for a rank: the network interface that it takes down.",
    "BSL_LAB_RECORDER": "Set by `bsl hang-lab` for its ranks: `0` turns the recorder of collectives off.",
}

_SUBMISSION = """
schema_version | 1
dry_run | whether it was a dry run
scheduler | `slurm` or `local`
site | name of the site
run | {name, directory}
attempt | {name, directory}
command | argv that submits the script
nodes | number of nodes
ranks_per_node | ranks on each
world_size | ranks in all
topology | {tp, pp, dp}: sizes of the axes
caller_options | list of {variable, value, option, applies, why}: what becomes of each `SBATCH_*` variable of the caller
left_out | list of {cluster, node, reason, evidence, since, expires, run, attempt, rank, by}: remembered bad nodes
"""

DOCUMENTS = {
    "bsl submit --json": _SUBMISSION
    + """
job_id | Slurm's job id; null for a local attempt
pid | the local launcher's pid; null for a Slurm job
said | what sbatch printed although it accepted the job, such as warnings of the site, line by line
successor_job_id | the job that waits behind it, for `slurm.chain.by: queue`; else null
exit | the attempt's `exit.json` if `submit` waited for the end, else null
exit.schema_version | 1
exit.reason | `finished`, `stopped`, `crashed`, `left_early` or another [reason](../how-to/status.md#why-it-ended)
exit.exit_code | the training's exit code
exit.first_failure | {rank, node, coordinate, signal, code, step, error, last_words, time}; null if nobody is named
exit.failed_ranks | numbers of the ranks that failed
exit.suspects | list of {rank, node, coordinate}: the ranks that a hang points at; empty if they are not known
exit.collectives | list of {backend, group, operation, sequence, timeout_ms, ranks}: what timed out, and who says so
exit.evidence | what supports the reason, and what is not known, one sentence each
exit.cause | why nothing was started, in the words of the shell or of Slurm; null for other reasons
exit.clocks | list of {node, ahead_s, corrected}: clocks that differ by more than 2 s, and whether times were corrected
exit.spy_bundle | evidence of a hang that `bsl spy` stored during the attempt; null if there is none
exit.world_size | ranks in all
exit.num_started | number of ranks that started
exit.slurm_reason | why Slurm ended the job, in its words
exit.attempt | name of the attempt
exit.job_id | Slurm's job id
exit.restart_count | how often Slurm had restarted the job
exit.started | seconds since the epoch
exit.ended | seconds since the epoch
""",
    "bsl submit --dry-run --json": _SUBMISSION
    + """
options | sbatch's options, as in the script's header
step_options | srun's options
environment[].name | a variable that the site or the run sets
environment[].value | its value
environment[].reason | why it is set
program | argv of every rank
exit_margin | {margin_s, how}: how long before the time limit Slurm signals the job; null on a local site
rank_map[].node_rank | number of the node in the job
rank_map[].ranks | its ranks, such as `8-15`
rank_map[].coordinates | their coordinates, such as `dp2-3 pp0 tp0-3`
stages[] | pipeline stages of `bsl train`; empty for another program
stages[].stage | number of the stage
stages[].layers[] | class names of its layers, in order
stages[].num_parameters | parameters that one of its ranks holds
stages[].milliseconds | predicted milliseconds of a micro batch, or null without a GPU
stages[].need_gib | GiB that a rank needs, or null without a GPU
script | the whole job script
""",
    "bsl rehearse --json": """
schema_version | 1
verdict | `go`, `no-go` or `unknown`
never_started | for what the job waited that never started; null otherwise
not_checked | everything that was not checked, one sentence each
run | {name, file}: the run that was rehearsed
directory | folder of the rehearsal, where this document is `report.json`
site | name of the site
scheduler | `slurm` or `local`
topology | {tp, pp, dp}: sizes of the axes in the rehearsal
made | seconds since the epoch
seconds | how long it took
identity | digest of what the rehearsal is valid for: model, parallelism, batches, program, environment, site
revision.repositories | git revision of `bsl` and of the working directory; null where it is not known
revision.dirty | whether there were uncommitted changes; null if that is not known
revision.diff_digest | digest of the uncommitted changes; null if there were none
revision.untracked_files | number of files that git does not track
versions | {bigsci_launch, python, torch, deepspeed, numpy} where `bsl` ran; null for a missing package
changes | list of {key, before, after, reason}: what differs from the run file
phases | list of {name, outcome, seconds, found}: `ok`, `failed`, `not checked` or `none`, and what was seen
measured | {step_s, save_s, eval_s, teardown_s, stop_s, slower_by}: seconds, and how much longer a step of the run takes
advice | what the measured times mean for the run file, one sentence each
""",
    "bsl status --json": """
schema_version | 1
run | {name, directory}; null for a job that bsl did not submit; only `job` is present then
attempt | {name, directory, count}: the attempt that is shown, and the number of attempts
scheduler | `slurm` or `local`
pid | the local launcher's pid; null for a Slurm job
job.job_id | Slurm's job id, or the launcher's pid
job.state | Slurm's state, such as `RUNNING`; `UNKNOWN` if no source knows it
job.raw_state | the state in the source's own words
job.source | where the state comes from: `squeue`, `sacct`, `scontrol`, `exit.json`, `launcher`, `none`
job.reason | why it is in this state
job.meaning | why it waits, in plain words; null if it does not wait, or if `bsl` does not know the reason
job.name | the job's name
job.user | its owner
job.partition | its partition
job.num_nodes | number of nodes
job.hostlist | the nodes, as Slurm writes them
job.cluster | the cluster that answered; null if its name was not needed
job.submitted | when it was queued, in seconds since the epoch; a requeue sets it again
job.expected_start | when Slurm expects a waiting job to start, in seconds since the epoch; null if it has no estimate
job.started | seconds since the epoch; null while it waits
job.ends | end, or time limit, in seconds since the epoch
job.elapsed_s | running time in seconds
topology | {tp, pp, dp}: sizes of the axes
world_size | ranks in all
num_ranks_started | ranks that have a pid record
step.step | the newest optimizer step that was reported
step.time | when, in seconds since the epoch
step.seconds | how long it took
step.tflops | TFLOP/s per rank
step.loss | its loss
step.consumed_samples | samples consumed so far
step.source | `record`, or `log` for a line that a program without records has printed
step.every_s | seconds between two such lines; null if they are not known
step.total_steps | steps of the whole run
step.age_s | seconds since it was reported
slowest_rank.rank | the rank whose newest heartbeat is oldest; the object is null if no rank writes heartbeats
slowest_rank.node | its node
slowest_rank.coordinate | its coordinate
slowest_rank.phase | the phase that it is in; null if it has written no heartbeat
slowest_rank.step | the step that it is in
slowest_rank.heartbeat_age_s | seconds since its newest heartbeat
slowest_rank.output_age_s | seconds since its log was last written; null if it is empty
last_output | {rank, age_s}: what was printed last; rank is null for the batch script; null if nothing was printed
checkpoint | {path, age_s}: the newest complete checkpoint
lost_nodes | nodes of a running job that Slurm cannot reach, and whose ranks are silent too
unreachable_nodes[].name | a node of a running job that Slurm cannot reach
unreachable_nodes[].raw_state | its state in sinfo's words
unreachable_nodes[].fate | `lost`, `alive` if its ranks gave a sign of life in the last 10 s, or `unknown` if \
they left none that tells
unreachable_nodes[].sign_age_s | seconds since the newest heartbeat or output of its ranks; null if they left none
exit | the attempt's `exit.json`, fields as under `bsl submit --json`; null while it runs, or if nobody knows why it \
ended. Without an `exit.json`, it has `reconstructed` as well: {source, host}; the source is `records` of the ranks or \
`job.out`
cancelled_by | who cancelled the job; null if it was not cancelled, or if Slurm's accounting does not say
next? | how the run continues after this attempt; null for a run that does not start itself again
next.text | that in one sentence
next.by | `requeue` or `queue`, as in `slurm.chain.by`
next.action | `continue`, `finished` or `stop`, as the job script decided; null if it has not yet
next.sentence | why
next.progress | whether the start made progress: `made`, `none`, or `unknown`
next.num_starts | starts of the chain so far
next.max_starts | `slurm.chain.max_starts`
next.asked | whether Slurm was asked for the next start; false if it refused
next.words | the words of the refusal
next.attempt | name of the attempt that waits
next.job_id | its job
next.expected_start | when Slurm expects it to start, in seconds since the epoch; null if it has no estimate
next.submit_again | the command that continues the run; null if it continues by itself
""",
    "bsl checkpoint list --json": """
schema_version | 1
checkpoints[].path | its folder
checkpoints[].step | the step after which it was saved
checkpoints[].bytes | size of its files; null if its record cannot be read
checkpoints[].latest | whether `latest` names it
checkpoints[].half_verified | whether its verification did not finish, or files have changed since; it is not pruned
checkpoints[].pinned | whether it is pinned, and so not pruned
checkpoints[].verified | whether it was verified and has not changed since
""",
    "bsl checkpoint verify --json": """
schema_version | 1
path | its folder
sound | whether every file is there with the bytes that were saved
problems | what is wrong, one sentence per file
""",
    "bsl list --json": """
schema_version | 1
root | the folder of runs
runs[].name | name of the run
runs[].directory | its directory
runs[].attempt | its newest attempt
runs[].state | as `job.state` of `bsl status`
runs[].is_worked_out | whether the state comes from the records of the ranks, because nothing else says how it ended
runs[].job | `job 12`, or `pid 4495 on host`
runs[].step | the newest step
runs[].total_steps | steps of the whole run
runs[].last_sign | time of the newest record of any rank, or else of the newest output, in seconds since the epoch
runs[].problem | why the run cannot be read; null if it can
""",
    "bsl nodes list --json": """
schema_version | 1
memory | the file that remembers the nodes
cluster | name of the cluster whose nodes are listed; null if it is not known: then those of all clusters
nodes[].cluster | name of the node's cluster; null if it was not known
nodes[].node | name of the node
nodes[].reason | `ecc`, `gpu`, `lost`, `failed_check`, `slow` or `by_hand`
nodes[].evidence | the line that shows it, or the words of who added it
nodes[].since | when it was seen, in seconds since the epoch
nodes[].expires | when the node is used again, in seconds since the epoch; null: when it is forgiven
nodes[].run | name of the run that saw it; null if none did
nodes[].attempt | the attempt of that run
nodes[].rank | the rank that showed it; null if it was none
nodes[].by | user whose command or job added it
""",
    "bsl nodes check --json": """
schema_version | 1
verdict | the worst of the nodes' verdicts
slow_factors | {gpu, other}: how many times slower than the others' median is slow
nodes[].node | name of the node
nodes[].verdict | `failed`, `slow`, `not_known` or `ok`
nodes[].why | what is wrong, or what is not known
nodes[].not_tried | list of tests that could not be tried, each with the reason
nodes[].tests | list of {name, status, value, unit, why}; a status is `ok`, `failed` or `not_tried`
nodes[].peers | list of {round, peer, status, value, why}: exchanges with other nodes, in MiB/s
nodes[].gpus? | GPUs that torch sees; null if none were looked for
nodes[].seconds? | how long the check of the node took
""",
    "bsl nodes bisect --json": """
schema_version | 1
spares | how many nodes may be slow at most
slow | list of {node, times_slower}
good | nodes that were in a fast group
not_known | groups that could not be timed, or were slow although none of their nodes was
reference_s | time of the fastest group in seconds; null if nothing could be timed
rounds | how often groups were timed
are_too_many | whether more nodes are slow than `spares`: there may be others
""",
    "bsl config check --json": """
schema_version | 1
file | the run file
ok | whether it is valid
problems | list of {where, key, text}
warnings | list of {key, other_key, text, severity}
layout | {nodes, ranks_per_node, topology}; null if the file is not valid
""",
    "bsl config show --json": """
schema_version | 1
file | the run file
site | {name, file}
layout | {nodes, ranks_per_node, topology}
config | every value, by section and key ([keys](config.md))
origins | where each value comes from, by dotted key
warnings | list of {key, other_key, text, severity}
""",
    "bsl config sites --json": """
schema_version | 1
sites[].name | what `slurm.site` names
sites[].file | its path
sites[].config | every value of the site file ([keys](config.md))
""",
    "bsl spy --json": """
schema_version | 1
job | name of the run, or Slurm's job id
world_size | ranks in all
coverage.ranks_read | number of ranks whose stacks were read
coverage.ranks_unreadable | list of {rank, node, why}
coverage.nodes_silent | list of {node, why}
coverage.numbering | whether the numbers of the ranks are `known`, `partly known` or `guessed`
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
verdict.suspects[] | {rank, node, pid, numbered_by, coordinate, why}; empty if nobody is accused
verdict.sides[] | {ranks, where}: who waits where
verdict.look_first[] | like suspects, with reason and hit_rate: where to look, in order; accuses nobody
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
bytes | {compared, read, from_journal, by_digest}: bytes of A's tensors; those read, and known without reading
sample | whether only a sample was read (`--sample`)
seam | the loss at the restart, if logs were given
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
stages[].stage | number of a stage of the configured layout
stages[].layers[] | class names of its layers, in order
stages[].num_transformer_layers | how many of them are transformer layers
stages[].parameters_per_rank | parameters that one of its ranks holds
stages[].state_bytes_per_rank | bytes of weights, gradients and optimizer state of such a rank
stages[].micro_batch_milliseconds | predicted milliseconds of a micro batch, or null without a GPU
stages[].need_gib | GiB that a rank needs, or null without a GPU
calibration.is_measured | whether it was fitted to measurements. Absent on a site without GPUs, as are all fields below
calibration.num_timed_runs | number of timed runs
calibration.mean_left_out_error | mean relative error of the runs, each predicted from all others
calibration.constants | the fitted constants, by name
calibration.drift_from | day on which a drift begins
calibration.gpu | GPU that it describes
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
plans[].tflops | {full, weights}: with and without attention and head
plans[].memory_gib | {first, middle, last, need, gpu}: nvidia-smi's figure for each stage; what must fit; what there is
plans[].out_of_memory | whether it does not fit
plans[].bubble | fraction of a step in which the slowest stage waits
plans[].terms | seconds of a step by cause
plans[].days | days to the end of the run
plans[].likely_days | days within which three of four such plans finish
plans[].gpu_hours | GPU-hours of the whole run
plans[].checkpoint_bytes | size of a checkpoint
plans[].advice | what would make it better
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


def fields_of(command: str) -> dict[str, str]:
    """Return the meaning of each path of a command's document."""
    pairs = (line.split(" | ", 1) for line in DOCUMENTS[command].strip().splitlines() if line)
    return {path: meaning for path, meaning in pairs}
