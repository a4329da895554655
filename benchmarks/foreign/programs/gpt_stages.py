"""A small GPT on Megatron-core: tensor parallel 2, pipeline parallel 2, on CPUs with gloo.

torchrun --nproc-per-node 4 gpt_stages.py --trouble none
"""

import argparse
import os
import signal
import time
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from diary import note
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE, VOCABULARY = 16, 64

torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *_: None


def on_cpu(make):
    return lambda *words, device=None, **more: make(*words, device="cpu" if device else None, **more)


for name in ("zeros", "empty", "ones", "tensor"):
    setattr(torch, name, on_cpu(getattr(torch, name)))


def build_model():
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, tensor_model_parallel_size=2, pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    model.model_type = ModelType.encoder_or_decoder
    return model


class Samples:
    """Token sequences, drawn from a seed; the odd one has a worker that is in trouble."""

    def __init__(self, trouble, rank, folder):
        self.trouble, self.rank, self.folder, self.drawn = trouble, rank, folder, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.drawn += 1
        if self.drawn == 13 and self.trouble in ("blend", "index"):
            note("struck", self.rank)
            if self.trouble == "index":
                build_sample_index(400)
            else:
                read_blend(self.folder)
        tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(self.drawn))
        return tokens


def build_sample_index(seconds):
    end, index = time.monotonic() + seconds, []
    while time.monotonic() < end:
        index = sorted(hash((number, len(index))) for number in range(20_000))
    return index


def read_blend(folder):
    name = os.path.join(folder, f"blend-{os.getpid()}")
    os.mkfifo(name)
    with open(name) as blend:
        return blend.read()


def loss_of(labels, output):
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def forward_step(samples, model):
    tokens = next(samples)
    positions = torch.arange(SEQUENCE)[None]
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, partial(loss_of, tokens)


def clip_gradients(model):
    norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    dist.all_reduce(norm, group=parallel_state.get_model_parallel_group())
    return float(norm) ** 0.5


def log_statistics(rank):
    """Write the statistics of a tensor-parallel group when all of it is there."""
    dist.barrier(group=parallel_state.get_tensor_model_parallel_group())
    print(f"statistics of rank {rank}", flush=True)


def disturb(trouble, rank):
    if trouble in ("none", "blend", "index"):
        return
    note("struck", rank)
    if trouble == "pause":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif trouble == "statistics":
        log_statistics(rank)
    elif trouble == "pipeline-message":
        dist.recv(torch.zeros(1), src=(rank + 2) % 4)
    elif trouble == "adapt":
        factor = 1
        while factor:
            factor = factor * 2 % 9973
    elif trouble == "offload":
        end = time.monotonic() + 400
        while time.monotonic() < end:
            with open("offload.bin", "wb") as file:
                file.write(os.urandom(1 << 20))
                os.fsync(file.fileno())
            time.sleep(0.2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trouble", default="none")
    parser.add_argument("--who", type=int, default=1)
    parser.add_argument("--think", type=float, default=0.05)
    parser.add_argument("--folder", default=".")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    note("hello", rank)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    torch.manual_seed(1)
    get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = get_forward_backward_func()
    mine = options.trouble if rank == options.who else "none"
    samples = Samples(mine, rank, options.folder)
    for step in range(10**9):
        if step == 3:
            disturb(mine, rank)
        schedule(
            forward_step_func=forward_step, data_iterator=samples, model=model, num_microbatches=4,
            seq_length=SEQUENCE, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        if not (step == 3 and mine == "clip"):
            clip_gradients(model)
        else:
            note("struck", rank)
        time.sleep(options.think)
        optimizer.step()
        optimizer.zero_grad()
        note(f"step {step} ended", rank)


if __name__ == "__main__":
    main()
