"""An autoencoder with Lightning: ddp (subprocesses), ddp_spawn or ddp_fork."""

import argparse
import threading
import time

import lightning as L
import torch
from diary import note
from torch.utils.data import DataLoader, TensorDataset

LATCH = threading.Condition()


class AutoEncoder(L.LightningModule):
    def __init__(self, incident, place):
        super().__init__()
        self.incident, self.place, self.count = incident, place, 0
        self.code = torch.nn.Sequential(torch.nn.Linear(40, 8), torch.nn.ReLU(), torch.nn.Linear(8, 40))

    def on_fit_start(self):
        note("hello", self.global_rank)

    def training_step(self, batch, number):
        (rows,) = batch
        self.count += 1
        if self.count < 10 or self.count % 100 == 0:
            note(f"step {self.count}", self.global_rank)
        is_here = self.incident and self.count == 7 and self.global_rank == self.place
        if is_here:
            note("struck", self.global_rank)
            if self.incident == "latch":
                with LATCH:
                    LATCH.wait()
        loss = (self.code(rows) - rows).pow(2).mean()
        if is_here and self.incident == "barrier":
            self.trainer.strategy.barrier()
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Upload(L.Callback):
    """Sends samples somewhere slow from one rank."""

    def on_train_batch_end(self, trainer, module, *rest):
        if module.incident == "upload" and module.count == 7 and module.global_rank == module.place:
            for _ in range(360):
                with open("samples.bin", "ab") as sent:
                    sent.write(bytes(10000))
                time.sleep(2.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("--incident", default="")
    parser.add_argument("--place", type=int, default=-1)
    options = parser.parse_args()
    loader = DataLoader(TensorDataset(torch.randn(4000, 40)), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu", devices=4, strategy=options.strategy, max_epochs=100000, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Upload()],
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(AutoEncoder(options.incident, options.place), loader)
