"""An ordinary Seq2SeqTrainer script that generates in its evaluations: nothing in it knows of Safepoint.

The model is a tiny T5 with dropout on random token blocks; generation samples, and --token-s stretches each token.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
)


class Pairs(torch.utils.data.Dataset):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(2, 64, (count, 6), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].flip(0)}


class Slow(StoppingCriteria):
    def __init__(self, token_s: float) -> None:
        self.token_s = token_s

    def __call__(self, input_ids, scores, **_):
        time.sleep(self.token_s)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class SlowT5(T5ForConditionalGeneration):
    token_s = 0.0
    marks = Path()
    step = None

    def generate(self, *args, **kwargs):
        with self.marks.open("a") as file:
            file.write(f"generation {self.step()}\n")
        return super().generate(*args, stopping_criteria=[Slow(self.token_s)], **kwargs)


def matching(prediction) -> dict[str, float]:
    """How many tokens were generated as they should be, and which: a sum that no other sample would have."""
    generated, wanted = prediction.predictions[:, 1:7], prediction.label_ids[:, :6]
    return {"match": float((generated == wanted).mean()), "sum": float(generated.sum())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--token-s", type=float, default=0)
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    args = Seq2SeqTrainingArguments(
        output_dir=options.out,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="match",
        predict_with_generate=True,
        generation_config=GenerationConfig(
            max_new_tokens=6, do_sample=True, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0
        ),
        logging_steps=3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    torch.manual_seed(1)
    model = SlowT5(
        T5Config(
            vocab_size=64,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.1,
            decoder_start_token_id=0,
        )
    )
    trainer = Seq2SeqTrainer(
        model, args, train_dataset=Pairs(64, 3), eval_dataset=Pairs(16, 4), compute_metrics=matching
    )
    model.token_s, model.step = options.token_s, lambda: trainer.state.global_step
    model.marks = Path(options.out, f"marks-{os.environ.get('RANK', '0')}")
    trainer.train()
    final = Path(options.out, "final")
    if trainer.is_world_process_zero():
        trainer.save_model(str(final))
        torch.save(trainer.optimizer.state_dict(), final / "optimizer.pt")
        (final / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
