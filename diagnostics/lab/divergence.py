"""Family A: every rank is in a collective, or on its way to one, but not in the same one. See step_loop.py."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from step_loop import NUM_FEATURES, Training, main, sleep_for_ever


class SkippedCollective(Training):
    """H01: a branch that depends on the rank skips one tensor-parallel all_reduce."""

    def backward_step(self, gradient: Any) -> None:
        if self.strikes():
            self.gradient += (gradient @ self.weight).flatten()
        else:
            super().backward_step(gradient)


class SkippedInOneGroup(Training):
    """H01 in a world with one group: with only data parallelism, one rank skips the all_reduce of its gradients."""

    def allreduce_gradients(self) -> None:
        if not self.strikes():
            super().allreduce_gradients()

    def clip_grad_norm(self) -> Any:
        import torch.distributed as dist

        norm = self.gradient.norm().reshape(1)
        dist.broadcast(norm, src=0)
        return norm


class UnevenRings(SkippedCollective):
    """H01 with small recorders, while some ranks issue more collectives: the rings cover different times."""

    def before_init(self) -> None:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "16"

    def forward_step(self, batch: Any) -> Any:
        output = super().forward_step(batch)
        for _ in range(5 if self.place.index["dp"] == 0 else 0):
            self.reduce_from_tensor_model_parallel_region(output)
        return output


class MoreData(Training):
    """H02: one rank runs out of batches, leaves the epoch early, and waits for the others in a barrier."""

    def get_batch(self) -> Any:
        if self.strikes():
            self.finish_epoch()
        return super().get_batch()

    def finish_epoch(self) -> None:
        import torch.distributed as dist

        dist.barrier()


class OtherOperation(Training):
    """H03: one rank broadcasts where the others reduce."""

    def others(self) -> bool:
        return self.strikes()

    def clip_grad_norm(self) -> Any:
        import torch.distributed as dist

        if not self.others():
            return super().clip_grad_norm()
        norm = self.gradient.norm().reshape(1)
        dist.broadcast(norm, src=0)
        return norm


class OtherOperationUneven(OtherOperation, UnevenRings):
    """H03 with rings that cover different times."""

    def backward_step(self, gradient: Any) -> None:
        Training.backward_step(self, gradient)


class OtherOperationOfMost(OtherOperation):
    """H03 where the majority is wrong: all ranks but one deviate from their own schedule."""

    def others(self) -> bool:
        if self.has_come():
            self.note("struck")
        return self.has_come() and self.rank != self.culprit


class OtherSize(Training):
    """H04: sizes differ. gloo aborts a peer, so this is a crash, not a hang."""

    def reduce_from_tensor_model_parallel_region(self, tensor: Any) -> Any:
        import torch

        wider = torch.ones(NUM_FEATURES, 2 * NUM_FEATURES) if self.strikes() else tensor
        return super().reduce_from_tensor_model_parallel_region(wider)[:, :NUM_FEATURES]


class OtherType(Training):
    """H05: types differ. gloo adds what it gets, and no rank hangs."""

    def clip_grad_norm(self) -> Any:
        import torch
        import torch.distributed as dist

        if not self.strikes():
            return super().clip_grad_norm()
        norm = torch.ones(1, dtype=torch.int32)
        dist.all_reduce(norm)
        return norm.float()


class OtherRoot(Training):
    """H06: one rank believes that it is the root of a broadcast; all ranks broadcast once per step."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.broadcast_loss()

    def broadcast_loss(self) -> None:
        import torch
        import torch.distributed as dist

        root = self.place.world_size - 1
        if self.strikes():
            root = self.rank if self.rank != root else 0
        dist.broadcast(torch.zeros(1), src=root)


class SwappedGroups(Training):
    """H07: two ranks reduce over their dp group first, so that in every group one rank waits and one is missing."""

    def swappers(self) -> list[int]:
        across = self.place.neighbour(self.place.neighbour(self.culprit, "tp"), "dp")
        return [self.culprit, across]

    def backward_step(self, gradient: Any) -> None:
        if not any(self.strikes(rank) for rank in self.swappers()):
            super().backward_step(gradient)
            return
        self.allreduce_gradients()
        super().backward_step(gradient)

    def allreduce_gradients(self) -> None:
        if not self.has_swapped():
            super().allreduce_gradients()

    def has_swapped(self) -> bool:
        """Whether the gradients of this step have already been reduced."""
        self.num_reduced = getattr(self, "num_reduced", 0) + 1
        return self.has_come() and self.num_reduced > self.step


class OneSwapped(SwappedGroups):
    """H07 with only one rank: there is no cycle, and no rank hangs."""

    def swappers(self) -> list[int]:
        return [self.culprit]


class MutualReceive(Training):
    """H08: two ranks receive from each other."""

    def train_step(self) -> None:
        import torch
        import torch.distributed as dist

        if not self.has_come():
            return super().train_step()
        partner = self.place.neighbour(self.culprit, "dp")
        if self.is_rank():
            self.exchange(torch.zeros(4), partner)
        elif self.is_rank(partner):
            self.exchange(torch.zeros(4), self.culprit)
        dist.barrier()

    def exchange(self, tensor: Any, partner: int) -> None:
        import torch.distributed as dist

        dist.recv(tensor, src=partner)
        dist.send(tensor, dst=partner)


class OtherTag(MutualReceive):
    """H09: one rank sends the micro batch that comes after the one that its partner expects."""

    def exchange(self, tensor: Any, partner: int) -> None:
        import torch.distributed as dist

        if self.rank == self.culprit:
            dist.send(tensor, dst=partner, tag=7)
        else:
            dist.recv(tensor, src=partner, tag=8)


class PhaseSplit(Training):
    """H10: some ranks are in the loss broadcast, the others in the exit flag's all_reduce, as in BLOOM's prequel."""

    def training_log(self) -> None:
        super().training_log()
        if self.has_come():
            self.note("struck")
            if self.place.index["dp"] != 0:
                self.aggregate_total_loss()
            self.check_exit()

    def aggregate_total_loss(self) -> None:
        import torch
        import torch.distributed as dist

        root = self.place.rank_at({**self.place.index, "dp": 0})
        dist.broadcast(torch.zeros(1), src=root, group=self.groups["dp"])

    def check_exit(self) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(1))


class SkippedStep(Training):
    """H11: one rank catches an error and drops the batch. All ranks continue, one step apart, and no rank hangs."""

    def train_step(self) -> None:
        try:
            if self.strikes():
                raise RuntimeError("DefaultCPUAllocator: not enough memory (simulated)")
            super().train_step()
        except RuntimeError as error:
            print(f"skipping a bad batch: {error}", flush=True)


class SkippedObjects(Training):
    """H12: one rank skips an all_gather_object."""

    def training_log(self) -> None:
        super().training_log()
        if self.has_come() and not self.is_rank():
            self.gather_timers()

    def gather_timers(self) -> None:
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(gathered, {"rank": self.rank, "forward": 0.1})


class LonelyNewGroup(Training):
    """H13: one rank creates a process group that the others do not create."""

    def get_batch(self) -> Any:
        import torch.distributed as dist

        if self.strikes():
            dist.new_group(list(range(self.place.world_size)))
        return super().get_batch()


class LateFirstUse(Training):
    """H14: a communicator connects at its first collective, which one rank does not reach."""

    def before_init(self) -> None:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"

    def initialize_distributed(self) -> None:
        import torch.distributed as dist

        super().initialize_distributed()
        self.late = dist.new_group(list(range(self.place.world_size)), group_desc="EMBEDDING_GROUP")

    def training_log(self) -> None:
        import torch
        import torch.distributed as dist

        super().training_log()
        if self.has_come() and not self.is_rank():
            dist.all_reduce(torch.zeros(1), group=self.late)


class LocalKillSwitch(Training):
    """H15: a file system shows the kill switch to one rank only, and that rank starts to save and exit."""

    def train_step(self) -> None:
        if self.kill_switch_is_present():
            self.save_checkpoint_and_exit()
        super().train_step()

    def kill_switch_is_present(self) -> bool:
        return self.strikes()

    def save_checkpoint_and_exit(self) -> None:
        import torch.distributed as dist

        dist.barrier()


class LocalSignal(LocalKillSwitch):
    """H15: a signal reaches one rank only."""

    signal = signal.SIGUSR1

    def before_init(self) -> None:
        self.is_asked_to_stop = False
        signal.signal(self.signal, self.ask_to_stop)

    def ask_to_stop(self, _number: int, _frame: Any) -> None:
        self.is_asked_to_stop = True

    def kill_switch_is_present(self) -> bool:
        if self.strikes():
            os.kill(os.getpid(), self.signal)
        return self.is_asked_to_stop


class SwappedHooks(Training):
    """H16: two all_gathers of parameters, a small and a large one, come in a different order on one rank."""

    def get_batch(self) -> Any:
        import torch
        import torch.distributed as dist

        sizes = [64, 128] if not self.strikes() else [128, 64]
        for size in sizes:
            gathered = [torch.zeros(size) for _ in range(self.place.sizes["dp"])]
            dist.all_gather(gathered, torch.ones(size), group=self.groups["dp"])
        return super().get_batch()


class OtherThread(Training):
    """H17: a thread of autograd issues the collective; the main threads look the same on all ranks."""

    def allreduce_gradients(self) -> None:
        thread = threading.Thread(target=self.backward_hook, name="autograd-0")
        thread.start()
        thread.join()

    def backward_hook(self) -> None:
        if self.strikes():
            self.read_offloaded_gradient()
        super().allreduce_gradients()

    def read_offloaded_gradient(self) -> None:
        sleep_for_ever()


class WaitElsewhere(Training):
    """H18: asynchronous collectives, issued in one place and waited for in another."""

    def allreduce_gradients(self) -> None:
        if self.strikes():
            self.read_offloaded_gradient()
        self.handle = self.issue_reduction()

    def issue_reduction(self) -> Any:
        import torch.distributed as dist

        group = self.groups["dp"]
        return dist.all_reduce(self.gradient, group=group, async_op=True) if group is not None else None

    def optimizer_step(self) -> None:
        if self.handle is not None:
            self.handle.wait()
        super().optimizer_step()

    def read_offloaded_gradient(self) -> None:
        sleep_for_ever()


class TwoCommunicators(Training):
    """H19: two threads use two groups, and one rank starts them in a different order. NCCL may hang, gloo does not."""

    def allreduce_gradients(self) -> None:
        axes = ["dp", "tp"] if not self.strikes() else ["tp", "dp"]
        threads = [threading.Thread(target=self.reduce_bucket, args=(axis,), name=f"bucket-{axis}") for axis in axes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def reduce_bucket(self, axis: str) -> None:
        self.all_reduce(self.gradient.clone(), axis)


class TiedEmbedding(Training):
    """H20: the first and the last stage reduce the gradient of the tied embedding; one of them skips that."""

    def initialize_distributed(self) -> None:
        import torch.distributed as dist

        super().initialize_distributed()
        for ranks in self.place.groups("pp"):
            group = dist.new_group([ranks[0], ranks[-1]], group_desc="EMBEDDING_GROUP")
            if self.rank in (ranks[0], ranks[-1]):
                self.embedding = group

    def allreduce_gradients(self) -> None:
        super().allreduce_gradients()
        if not self.strikes():
            self.allreduce_embedding_gradients()

    def allreduce_embedding_gradients(self) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(8), group=self.embedding)


class UnevenSplits(Training):
    """H21: in an all_to_all, one rank sends more than its peers expect."""

    def get_batch(self) -> Any:
        import torch
        import torch.distributed as dist

        size = self.place.world_size
        splits = [4] * size
        if self.strikes():
            splits[(self.rank + 1) % size] = 8
        received = torch.zeros(4 * size)
        dist.all_to_all_single(received, torch.ones(sum(splits)), input_split_sizes=splits,
                               output_split_sizes=[4] * size)  # fmt: skip
        return super().get_batch()


class OtherFlag(Training):
    """H22: one rank was started with another flag and never reduces in its backward pass: there is no history."""

    def backward_step(self, gradient: Any) -> None:
        if self.is_rank():
            self.gradient += (gradient @ self.weight).flatten()
        else:
            super().backward_step(gradient)


RECIPES: dict[str, type[Training]] = {
    "skip": SkippedCollective,
    "skip-world": SkippedInOneGroup,
    "skip-wrapped": UnevenRings,
    "uneven-data": MoreData,
    "type": OtherOperation,
    "type-wrapped": OtherOperationUneven,
    "type-majority": OtherOperationOfMost,
    "size": OtherSize,
    "dtype": OtherType,
    "root": OtherRoot,
    "order": SwappedGroups,
    "order-single": OneSwapped,
    "recv-recv": MutualReceive,
    "tag": OtherTag,
    "phase-split": PhaseSplit,
    "skip-step": SkippedStep,
    "skip-object": SkippedObjects,
    "new-group": LonelyNewGroup,
    "lazy-group": LateFirstUse,
    "kill-switch": LocalKillSwitch,
    "signal": LocalSignal,
    "hook-order": SwappedHooks,
    "other-thread": OtherThread,
    "async-wait": WaitElsewhere,
    "two-communicators": TwoCommunicators,
    "embedding": TiedEmbedding,
    "uneven-splits": UnevenSplits,
    "other-flag": OtherFlag,
}

if __name__ == "__main__":
    main(RECIPES)
