"""Train with accelerate, lightning or transformers, named by the argument, over "collectives".

Rank 0 prints the backend, the number of ranks and the weights.
"""

import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import collectives.torch  # noqa: F401


class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(4, generator=generator)
        return {"inputs": inputs, "labels": inputs.sum(0, keepdim=True)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs, labels=None):
        outputs = self.layer(inputs)
        loss = None if labels is None else nn.functional.mse_loss(outputs, labels)
        return {"loss": loss, "logits": outputs}


def report(model):
    backend = dist.get_backend()
    weights = [round(number, 4) for number in model.layer.weight.detach().flatten().tolist()]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, weights)
    assert all(each == weights for each in gathered), gathered
    if dist.get_rank() == 0:
        print("REPORT", backend, dist.get_world_size(), *weights, flush=True)


def accelerate():
    from accelerate import Accelerator

    dist.init_process_group("collectives")
    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Numbers(), 8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
    report(accelerator.unwrap_model(model))


def lightning():
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend="collectives"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Numbers(), 8 // ranks))
    report(module.model)


def transformers():
    from transformers import Trainer, TrainingArguments

    dist.init_process_group("collectives")
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8 // dist.get_world_size(),
            num_train_epochs=1,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            optim="sgd",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            max_grad_norm=0,
            train_sampling_strategy="sequential",
        )
        trainer = Trainer(model, arguments, train_dataset=Numbers())
        trainer.train()
        report(trainer.model)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
