"""Hugging Face's `Trainer`: a callback that saves and restores.

    callback = CkptKitCallback("s3://runs/llama", every=50)
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(args.output_dir))

`resume` asks the run for its newest step and tells the Trainer how far it had come, so that data goes on where it was; weights,
optimizer, schedule and random generators come back in place when training begins. Set `save_strategy="no"`: there is nothing left for it to save.
"""

import json
import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ckptkit import ops
from ckptkit.errors import FormatError
from ckptkit.hooks.checkpointer import Checkpointer
from ckptkit.hooks.extras import pack_value, rng_state, set_rng_state, unpack_value
from ckptkit.ops import runs

_MARKER = "ckptkit-resume"


class CkptKitCallback(TrainerCallback):
    """Saves every `every` optimizer steps, beside the training.

    Args:
        url: Of the run.
        options: As `Checkpointer` takes them. The cache is off unless asked for: what `resume` reads must be durable.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self.options = {"cache": "off", **options}
        self.checkpointer: Checkpointer | None = None
        self._state = _State()
        self._rng: dict[str, Any] | None = None

    def resume(self, output_dir: str) -> str | None:
        """What to give `Trainer.train(resume_from_checkpoint=...)`: a folder that says how far the run's newest step is, or None for a new run.

        Every process calls it; it holds no weights.

        Raises FormatError where the run holds steps but none that is whole.
        """
        if not runs.has_steps(self.url):
            return None
        common = ops.open(self.url).catalog.extras.common
        if "trainer" not in common:
            raise FormatError(
                f"the newest step of {self.url} was not saved by a Trainer; it does not say where its data was"
            )
        folder = os.path.join(output_dir, _MARKER)
        os.makedirs(folder, exist_ok=True)
        plain = unpack_value(common["trainer"])
        for name, data in (
            ("trainer_state.json", json.dumps(plain).encode()),
            (
                "model.safetensors",
                (2).to_bytes(8, "little") + b"{}",
            ),  # no weights: they are restored in place
        ):
            temporary = os.path.join(folder, f".{name}.{os.getpid()}")
            with open(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, os.path.join(folder, name))
        return folder

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer will warn that the folder of `resume` holds no weights; it asks every model what its own have."""
        model = kwargs.get("model")
        if model is not None and not hasattr(model, "_keys_to_ignore_on_save"):
            model._keys_to_ignore_on_save = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register what the Trainer made, and restore."""
        self._state.state = state
        ckpt = self.checkpointer = Checkpointer(self.url, **self.options)
        ckpt.register(
            model=kwargs["model"], optimizer=kwargs["optimizer"], scheduler=_inner(kwargs.get("lr_scheduler"), "scheduler"),
            extras={"trainer": self._state},
        )  # fmt: skip
        step = ckpt.restore()
        if step != state.global_step:
            raise FormatError(
                f"{self.url} gives step {step}, but the Trainer starts at {state.global_step}; give "
                "trainer.train(resume_from_checkpoint=callback.resume(output_dir))"
            )
        # Data loaders draw from the generators before the first batch; the step itself starts as it was saved.
        self._rng = rng_state(None) if step else None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._rng is not None:
            rng, self._rng = self._rng, None
            set_rng_state(pack_value(rng, "rng"), None)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.checkpointer is not None
        self.checkpointer.on_step_end(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None


class _State:
    """The Trainer's own state, as far as it is plain."""

    state: TrainerState | None = None

    def state_dict(self) -> dict[str, Any]:
        assert self.state is not None
        keep = (
            "epoch",
            "global_step",
            "max_steps",
            "num_train_epochs",
            "total_flos",
            "train_batch_size",
            "log_history",
            "num_input_tokens_seen",
        )
        plain = {name: getattr(self.state, name) for name in keep if hasattr(self.state, name)}
        return {**plain, "logging_steps": self.state.logging_steps, "stateful_callbacks": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The Trainer has read it from the folder of `resume`."""


def _inner(thing: Any, name: str) -> Any:
    """What Accelerate has wrapped."""
    return getattr(thing, name, thing) if type(thing).__module__.startswith("accelerate") else thing
