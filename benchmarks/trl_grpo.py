"""TRL's GRPOTrainer on the sums: one process, started by vs_trl.py with a Python that has trl.

    python -m benchmarks.trl_grpo PLAN.json

Writes steps.jsonl (step, time since the epoch) and snapshots/STEP.safetensors into the plan's folder.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PLAN = json.loads(Path(sys.argv[1]).read_text()) if __name__ == "__main__" else {}


def main() -> None:
    torch.set_num_threads(PLAN["threads"])
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from flashflow.quickstart.task import exact_answer

    folder = Path(PLAN["folder"])
    model = AutoModelForCausalLM.from_pretrained(PLAN["model"], dtype=torch.float32)
    rows = [json.loads(line) for line in Path(PLAN["rows"]).read_text().splitlines()]

    def exact(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [exact_answer(completion, right) for completion, right in zip(completions, answer, strict=True)]

    class Stamps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step, now = state.global_step, time.time()
            with (folder / "steps.jsonl").open("a") as steps:
                steps.write(json.dumps({"step": step, "time": now}) + "\n")
            if step % PLAN["snapshot_steps"] == 0:
                weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
                save_file(weights, folder / "snapshots" / f"{step}.safetensors")

    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PLAN["samples"],
        gradient_accumulation_steps=1,
        num_generations=PLAN["group_size"],
        max_completion_length=PLAN["max_new_tokens"],
        max_steps=PLAN["steps"],
        temperature=1.0,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        learning_rate=PLAN["lr"],
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        seed=PLAN["seed"],
        report_to=[],
        logging_steps=10,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(PLAN["model"], padding_side="left"),
        callbacks=[Stamps()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
