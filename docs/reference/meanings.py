"""Meanings of environment variables and of fields of JSON documents, for generated pages. Tests check them.

A line of a document is `path | meaning`. `[]` steps into a list. A meaning that begins with `{a, b}` names all fields
of the object at that path. An object without such a list and without lines of its own has names that depend on the
run. A path that ends with `?` may be absent.
"""

from __future__ import annotations

from analysis_meanings import ANALYSES

VARIABLES = {
    "BSL_RUNS": "Folder in which `bsl` looks up runs by name; default: `runs` in the current folder.",
    "BSL_PATH": "Folders, separated by colons: site files of your own in `sites/`, known hangs in `signatures/`, "
    "known code in `known/`.",
    "BSL_CLUSTER_DIR": "Directory of the cluster of `bsl cluster`; default: `~/.bsl-cluster`. Its path must be short.",
    "XDG_STATE_HOME": "`bsl spy` stores evidence of jobs without a run in its `bsl/spy/`; default: `~/.local/state`.",
    "BSL_DEBUG": "`1`: an error shows its traceback instead of one line.",
    "BSL_RUN_DIR": "Set for every rank: the run directory.",
    "BSL_ATTEMPT": "Set for every rank: the name of the attempt, such as `0001`.",
    "BSL_TOPOLOGY": "Set for every rank: the sizes of the axes, such as `tp=2,dp=4`.",
    "BSL_GENERATION": "Set for every rank of a run with `survive`: the number of the generation, from 0 on.",
    "BSL_SLOT": "Set for every rank of a run with `survive`: the number of its slot, by which a new runner knows what "
    "an earlier one has left there.",
    "BSL_SLOT_FD": "Set for every process of `bsl train` with `survive`: the descriptor that tells it its rank.",
    "BSL_CONTROLLER": "Set for the runners of a job with `survive`: the address of the controller.",
    "BSL_CONTROLLER_TOKEN": "Set for the runners of a job with `survive`: what proves to the controller who they are.",
    "BSL_CHECK_TOKEN": "Set for the node check: what proves to other nodes of the check that one belongs to it.",
    "BSL_RING_DIR": "Set for every rank: the folder on its node in which it keeps its last calls.",
    "BSL_WORKER_RUNNER": "Set for every launcher (`slurm.ranks_per_task`): the command that starts a worker's runner.",
    "BSL_TRACE": "Set for every rank: the file that says which calls it traces, if any.",
    "BSL_SUBJECT": "Set for the program in `monitor.notify.command`: the message in one line.",
    "BSL_MESSAGE": "Set for the program in `monitor.notify.command`: the message as a JSON document.",
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
exit.first_failure | {rank, node, coordinate, signal, code, step, error, last_words, time}; null if no rank is named
exit.failed_ranks | numbers of the ranks that failed
exit.suspects | list of {rank, node, coordinate}: ranks that a hang points at, or that a guard's finding is about if \
it accuses none or several of them; empty if they are not known
exit.collectives | list of {backend, group, operation, sequence, timeout_ms, ranks}: what timed out, and who says so
exit.evidence | what supports the reason, and what is not known, one sentence each
exit.cause | why nothing was started, in the words of the shell or of Slurm, what a full disk refused, or what a guard \
found without accusing a rank; else null
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
environment[].value | its value; `<secret>` unless it is known to hold none; null: that of the submitting environment
environment[].reason | why it is set; null if nothing says so
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
script | the whole job script, with `<secret>` for the same values
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
    "bsl why --json": """
schema_version | 1
about | what was asked about: `run NAME`, `job ID`, or the files
kind | why it ended, such as `hang`, `out_of_memory`, `running` or `unknown`; of a run, a reason of `exit.json`
is_certain | whether the words prove the kind; if not, it is the most likely one
sentence | why it ended, in words
first_failure.is_known | whether a first failing rank, task or node is named
first_failure.text | who failed first, or why that is not known
first_failure.ranks | global ranks
first_failure.tasks | tasks of srun, where nothing says that they are ranks
first_failure.local_rank | the rank on its node; null if only the global one is known
first_failure.node | the node
evidence | list of {file, line, said, word, speaker, kind, rank, node}: lines that show it; `word` is their entry
notes | list of sentences: what else supports the answer, and what was not read
next | what to do now; null if there is nothing
read | the files that were read, and `Slurm` if it was asked
""",
    "bsl slow --json": """
schema_version | 1
how | what was looked at: `rings`, or looks at random moments
num_steps | how many steps were seen; null if steps cannot be counted
seconds | how long they took, or for how long it was looked
step_ms | how long a step takes, in ms; null if that is not known
stragglers[] | {kind, ranks, nodes, phase, cost, site, causes}; what costs most first
stragglers[].kind | `slow rank`, `slow stage`, `slow link` or `uneven cut`
stragglers[].cost | {ms_per_step, low, high, share, share_low, share_high}, with 95 % intervals, null where not known
stragglers[].site | where in the code
stragglers[].causes | list of sentences about the node
imbalances | list of {ranks, reason, cost}: work that is shared unevenly by nature
missing | list of sentences: what could not be looked at, and why late messages accuse no link
undecided | why no rank can be named; null if that is not so
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
step.stride | steps between two such lines; null if there is only one, and for records
step.planned_s | how long it was planned to take, with `parallelism.engine: uneven`; null if it was not planned
step.total_steps | steps of the whole run
step.clock_differs | whether `time` is by a clock that is known to be wrong
step.age_s | seconds since it was reported; null if a clock is known to be wrong
slowest_rank.rank | the rank whose newest heartbeat is oldest; the object is null if no rank writes heartbeats
slowest_rank.node | its node
slowest_rank.coordinate | its coordinate
slowest_rank.phase | the phase that it is in; null if it has written no heartbeat
slowest_rank.step | the step that it is in
slowest_rank.heartbeat_age_s | seconds since its newest heartbeat; null if its clock is known to be wrong
slowest_rank.output_age_s | seconds since its log was last written; null if it is empty
last_output | {rank, age_s}: what was printed last; rank is null for the batch script; null if nothing was printed
checkpoint | {path, age_s}: the newest complete checkpoint
refused_saves | saves that the disk refuses now; null if the last one worked, or none was due
refused_saves.since | the step after which the first of them was due
refused_saves.step | the step after which the last of them was tried
refused_saves.newest | the step of the newest checkpoint; null if there is none
refused_saves.ranks[] | ranks whose parts the disk refused
refused_saves.node | the node of the first of them
refused_saves.path | the file that it refused
refused_saves.errno | the name of the error, such as `ENOSPC`; null if it said none
refused_saves.text | what it refused, as a sentence
refused_saves.hint | what to do
refused_saves.time | when the last of them was tried, in seconds since the epoch
refused_saves.retry | when the next one is due at the latest, in seconds since the epoch
restart | how the loss moved where the attempt continued the run; null if it began at step 1
restart.verdict | `spike`, `other loss` (for the same step), `equal`, `no jump` or `unknown`
restart.checkpoint | the checkpoint that it loaded; null if that is not recorded
restart.after_attempt | the attempt whose losses came before
restart.step | the first step after the restart; null, like all figures, if the losses on one side are not known
restart.loss_before | the loss of the step before, or of the same step in the earlier attempt
restart.loss_after | the loss of the first step
restart.jump | by how much that is more than expected
restart.spread | standard deviation of the run's own changes from step to step, from medians; null if they are too few
restart.spreads | the jump in units of the spread
restart.text | what is known, as a sentence
restart.causes[] | what records and weights show to have changed or failed there
restart.not_known[] | what was not recorded, and so cannot be excluded
restart.compare[] | commands that compare more
pipelines | the record of the pipelines that train now, with `parallelism.engine: uneven`; null for any other run
generations | with `survive`: {newest, is_recovering, recovering_since, text, exit_code, gave_up, unknown, all}; \
null without. `all` has for each generation its number, when it began, its ranks, what ended it (cause, failures), the \
nodes that are left out from then on, and its `recovery`: {text, seconds of each phase, source, why, step, \
first_step, steps_replayed, samples_lost}; what is not known is null
strangers | connections to ports of the attempt that were sent away because they did not have its token
strangers.survive | those at the port of the controller of `survive`; null if it recorded none
strangers.node_check | those at the ports of the node check; null without a check
strangers.newest | {host, time}: who called last at the controller; null if there was none
lost_nodes | nodes of a running job that Slurm cannot reach, and whose ranks are silent too
unreachable_nodes[].name | a node of a running job that Slurm cannot reach
unreachable_nodes[].raw_state | its state in sinfo's words
unreachable_nodes[].fate | `lost`, `alive` if its ranks gave a sign of life in the last 10 s, or `unknown` if \
they left none that tells
unreachable_nodes[].sign_age_s | seconds since the newest heartbeat or output of its ranks; null if they left none
micro_batch | with `training.micro_batch_size: auto`: {size, evaluation_size, fingerprint, too_large, headroom, \
history}; null without. too_large is the smallest size that was seen not to fit, and headroom the free part of the \
fullest device's memory at the peak of the trial; both are null if that is not known. `history` has for each change \
its time, step (the last one done before it), why, was, size and words
exit | the attempt's `exit.json`, fields as under `bsl submit --json`; null while it runs, or if it is not known why \
it ended. Without an `exit.json`, it has `reconstructed` as well: {source, host}; the source is `records` of the ranks \
or `job.out`
cancelled_by | who cancelled the job; null if it was not cancelled, or neither `bsl cancel` nor Slurm's accounting has \
recorded it
next? | how the run continues after this attempt; null for a run that does not start itself again
next.text | that in one sentence
next.by | `requeue` or `queue`, as in `slurm.chain.by`
next.action | `continue`, `finished` or `stop`, as the job script decided; null if it has not yet
next.sentence | why
next.progress | whether the start made progress: `made`, `none`, or `unknown`
next.num_queued | attempts that wait behind this one
next.num_starts | starts of the chain so far
next.max_starts | `slurm.chain.max_starts`
next.asked | whether Slurm was asked for the next start; false if it refused
next.words | the words of the refusal
next.attempt | name of the attempt that waits
next.job_id | its job
next.expected_start | when Slurm expects it to start, in seconds since the epoch; null if it has no estimate
next.submit_again | the command that continues the run; null if it continues by itself
watching.left_out[] | what was left out because it is no record, or is not the owner's: a sentence for each file
watching.watchers[].name | a watcher of the newest attempt: `agent-0001`, started by the job script, or HOST-PID
watching.watchers[].host | its machine
watching.watchers[].pid | its process
watching.watchers[].start_ticks | when that began, in clock ticks since boot; null if it is not known
watching.watchers[].time | its newest sign of life, in seconds since the epoch by the clock of its machine
watching.watchers[].every_s | seconds between two rounds
watching.watchers[].health | what it says: `healthy`, `finding`, or `blind` if it could not see
watching.watchers[].sentence | the same in words
watching.watchers[].attempt | the attempt that it watches
watching.watchers[].may_act | whether it may act
watching.watchers[].blind | what it could not see
watching.watchers[].ended | whether it has left by itself
watching.watchers[].is_dead | whether it is gone without having said so; null if that is not known
watching.findings[].lost_ranks | the time of how many ranks is lost while it holds; null if that is not known
watching.findings[].accuses | whether it says which ranks caused it
watching.findings[].lost_rank_hours | how many hours of a rank's time are lost so far; null if that is not known
watching.findings[].kind | what is wrong: `hang`, `stall`, `dead`, `slow`, `straggler`, `slower`, `loss_spike`, ...
watching.findings[].key | the same for the same finding
watching.findings[].sentence | what is wrong, for people
watching.findings[].noticed | when it was found, in seconds since the epoch
watching.findings[].attempt | the attempt; null if it is about the run
watching.findings[].step | the step; null if it is about none
watching.findings[].since | the onset, in seconds since the epoch; null if it is not known
watching.findings[].details | further sentences
watching.findings[].bundle | the evidence, a folder for `bsl spy --bundle`; null if there is none
watching.findings[].signature | equal for hangs whose ranks are in the same places; empty if they were not seen
watching.findings[].cleared | when it was over; null if it is not
watching.acts[].key | the same for all lines about one act
watching.acts[].what | what was done, or asked for
watching.acts[].who | who did it or asked for it
watching.acts[].why | their reason
watching.acts[].state | `begun`, `done`, `refused` or `failed`
watching.acts[].words | the result
watching.acts[].attempt | the attempt
watching.acts[].step | the step; null if it is about none
watching.acts[].time | seconds since the epoch
watching.acts[].stage | how far it has got, for the watcher that carries it through
watching.undelivered | ways by which people could not be told, one sentence each
""",
    "bsl checkpoint list --json": """
schema_version | 1
checkpoints[].path | its folder
checkpoints[].step | the step after which it was saved
checkpoints[].bytes | size of its files; null if its record cannot be read
checkpoints[].latest | whether `latest` names it
checkpoints[].passed | whether the guards found nothing before it was saved; null: not known
checkpoints[].half_verified | whether its verification did not finish, or files have changed since; it is not pruned
checkpoints[].pinned | whether it is pinned, and so not pruned
checkpoints[].verified | whether it was verified and has not changed since
""",
    "bsl checkpoint verify --json": """
schema_version | 1
path | its folder
sound | whether every file is there with the bytes that were saved
problems | what is wrong, one sentence per file
remarks | what cannot be known of a sound checkpoint, or what the guards found before it was saved
""",
    "bsl logs --json": """
schema_version | 1
time | when the line was printed, in UTC, as `2026-11-27T14:30:05.123456Z`; null if the log has no times yet
rank | the rank; null for a launcher and for the script of the job
from | node, rank and coordinates; `batch` for the script of the job
text | the line
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
    "bsl notify --json": """
schema_version | 1
run | {name, directory}
attempt | whose `monitor.notify` was tried
deliveries[].way | `command` or `webhook`
deliveries[].ok | whether the message was delivered
deliveries[].words | the result; never an address
deliveries[].seconds | how long it took
""",
    "bsl watch --json": """
schema_version | 1
run | the run directory; null for a job that bsl did not submit
job_id | Slurm's job id; null for a local attempt
attempt | the newest attempt; null for a job that bsl did not submit
health | `healthy`, `finding`, or `blind` if it could not be seen
sentence | the same in words
is_over | whether the attempt is over
step | the last finished step; null if none was seen
phase | the phase that the run is in: `start`, `step`, `eval`, `save`, `copy`, `load`, `dump`, `end`, `unknown`
silent_s | for how long nothing new was seen
usual_s | how long the phase usually takes; null if it is not known
pace | what the silence means by the clock: `usual`, `long`, `too long`, `unknown`
findings | list of {kind, key, sentence, noticed, attempt, step, since, details, bundle, signature, cleared, \
lost_ranks, accuses}
blind | what could not be seen
remarks | what is no finding
""",
    "bsl control --json": """
schema_version | 1
run | the run directory
requests[].key | what tells it from others; null for one that was just written
requests[].verb | `save`, `exit`, `restart`, `dump` or `kill`; another word if it was refused for that
requests[].who | login name of the owner of the file that asks it
requests[].why | the reason
requests[].after_step | the optimizer step after which it is due; null: at once
requests[].attempt | the attempt that is meant; null if its file does not say so
requests[].asked | when it was written, in seconds since the epoch
requests[].state | `waiting` for a watcher, `begun`, `done`, `refused` or `failed`
requests[].words | the result as a sentence
requests[].lines[] | {time, state, words}: everything that was done for it, oldest first
watchers[] | {name, host, last_sign, every_s}: who serves requests now, and how often it looks
next | what happens next with a request that was just written, in sentences
""",
    "bsl nodes list --json": """
schema_version | 1
memory | the file that remembers the nodes
cluster | name of the cluster whose nodes are listed; null if it is not known: then those of all clusters
nodes[].cluster | name of the node's cluster; null if it was not known
nodes[].node | name of the node
nodes[].reason | `ecc`, `gpu`, `lost`, `failed_check`, `slow`, `hang` or `by_hand`
nodes[].evidence | the line that shows it, or the words of who added it
nodes[].since | when it was seen, in seconds since the epoch
nodes[].expires | when the node is used again, in seconds since the epoch; null: when it is forgiven
nodes[].run | name of the run that saw it; null if none did
nodes[].attempt | the attempt of that run
nodes[].rank | the rank that showed it; null if it was none
nodes[].by | user whose command or job added it
often_slow[].node | name of a node that was slower than its peers in two runs of the last 30 days, and in half of them
often_slow[].slow_runs | in how many
often_slow[].runs | of how many
often_slow[].times_longer | how many times longer than its peers its slowest rank needed for its passes, typically
often_slow[].newest_run | the newest run in which it was slow
""",
    "bsl nodes check --json": """
schema_version | 1
verdict | the worst of the nodes' verdicts
slow_factors | {gpu, other}: how many times slower than the others' median is slow
strangers | how many connections to the nodes were sent away because they did not have the token of the check
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
sites[].config | every value of the site file ([keys](config.md)); null if it cannot be used
sites[].problem | what is wrong with the file; null if it can be used
""",
    "bsl trace last --json": """
schema_version | 1
groups | list of {ranks}: ranks whose last calls are equal, the smallest group first; null for a rank without a number
ranks[].rank | global rank; null if it is not known, and for a process that a rank has started
ranks[].name | `rank 3`, or the name of the file
ranks[].why_unknown | why nothing is known of the rank; null if its ring was read
ranks[].is_copy | whether the process is gone, and this is the ring that it left
ranks[].step | the step that it was in; null if not known
ranks[].phase | what it did in the step; empty if the program does not say so; null if not known
ranks[].heartbeat | when a thread of the process last ran, seconds since the epoch; null if not known
ranks[].traced | packages whose calls are traced; null if none are
ranks[].how_traced | how, until when, and what is missing; null if none are
ranks[].stands_in | the call in which it wrote its stacks when no Python thread could run; null if it wrote none
ranks[].calls[].entered | when the call began, seconds since the epoch; the oldest call comes first
ranks[].calls[].left | when it ended; null if it has not
ranks[].calls[].operation | `all_reduce`, `recv`, `torch.save`, or a traced function; null if the name had no room
ranks[].calls[].group | torch's name of the group and its ranks; null for calls without one
ranks[].calls[].number | number of the collective in its group; null for other calls
ranks[].calls[].peer | the other rank of a message, else null
ranks[].calls[].tag | tag of a message, else null
ranks[].calls[].tensors | element type and shape; null if not known
ranks[].calls[].place | file, line and function that called; of a traced function, where it is
ranks[].calls[].step | the step in which it began; null if not known
ranks[].calls[].is_async | whether it returned before its work was done
ranks[].calls[].thread | number of the thread on its node
""",
    **ANALYSES,
}


def fields_of(command: str) -> dict[str, str]:
    """Return the meaning of each path of a command's document."""
    pairs = (line.split(" | ", 1) for line in DOCUMENTS[command].strip().splitlines() if line)
    return {path: meaning for path, meaning in pairs}
