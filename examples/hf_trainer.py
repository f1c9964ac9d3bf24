"""Hugging Face's Trainer: a callback, and what it says about where to go on.

    python examples/hf_trainer.py RUN
    torchrun --nproc-per-node 2 examples/hf_trainer.py RUN

The batch of all ranks together stays the same, so that the schedule and the order of the data do.
"""

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from toy import BATCH, STEPS, Net, samples
from transformers import Trainer, TrainerCallback, TrainingArguments

from ckptkit.hooks.integrations.hf_trainer import CkptKitCallback


class Classifier(Net):
    """The Trainer wants the loss from the model."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


class Print(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in kwargs["logs"]:
            print(state.global_step, f"{kwargs['logs']['loss']:.12g}", flush=True)


def main(run: str) -> None:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=os.path.join(run, "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",  # the callback saves
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    x, y = samples()
    data = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    callback = CkptKitCallback(run, every=10, busy="wait")  # toy steps are faster than any disk
    trainer = Trainer(model=Classifier(), args=arguments, train_dataset=data, callbacks=[callback, Print()])
    trainer.train(resume_from_checkpoint=callback.resume(arguments.output_dir))


if __name__ == "__main__":
    main(sys.argv[1])
