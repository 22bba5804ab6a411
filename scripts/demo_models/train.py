"""Train a demo model on the generated corpus and write it as a Hugging Face folder.

    python scripts/demo_models/train.py --model demo --out DIR [--seed 0] [--first-phase N]

Each phase writes float32 weights to DIR, next to the published folder. `--first-phase` resumes from the
previous phase's weights.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from architectures import RECIPES, Recipe
from batches import IGNORED, Batch, batches
from corpus import DEFAULT_SEED, Corpus
from safetensors.torch import load_model, save_file, save_model
from tokenizer import END, PAD, TEMPLATE, TOKENIZER_CONFIG, train_tokenizer
from torch.nn.functional import cross_entropy
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

TOKENS_PER_BATCH = 2048
WARM_UP = 0.03
WEIGHT_DECAY = 0.05
LARGEST_GRADIENT = 1.0
SAVE_EVERY = 1_000_000
REPORT_EVERY = 100


def make_model(config: dict[str, Any]) -> PreTrainedModel:
    """Make an untrained model in float32."""
    if config["model_type"] == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**config)).float()
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).float()
        model.set_experts_implementation("grouped_mm")
    # The fused attention's backward pass is slow on CPUs: a third of the whole step.
    model.set_attn_implementation("eager")
    return model


def make_optimizer(model: PreTrainedModel, learning_rate: float) -> torch.optim.AdamW:
    """Make an optimizer that decays matrices but not norms."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=True)


def rate_at(progress: float) -> float:
    """Return the learning rate: warm-up, then cosine decay to zero."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP))))


def loss_of(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the loss of the answers; the output head runs only on their positions."""
    learned = batch.targets != IGNORED
    mixture = getattr(model.config, "num_experts", 0)
    options = {"output_router_logits": True} if mixture else {}
    with torch.autocast("cpu", torch.bfloat16):
        output = model.model(input_ids=batch.inputs, use_cache=False, **options)
        logits = model.lm_head(output.last_hidden_state[learned])
    loss = cross_entropy(logits.float(), batch.targets[learned])
    if mixture:
        balance = load_balancing_loss_func(output.router_logits, mixture, model.config.num_experts_per_tok)
        loss = loss + model.config.router_aux_loss_coef * balance
    return loss


def exported_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return bfloat16 weights with the names of the published Qwen3 models, one tensor per expert."""
    weights: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(weight):
                gate, up = both.chunk(2)
                weights[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate
                weights[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(weight):
                weights[name.replace("down_proj", f"{expert}.down_proj.weight")] = down
        else:
            weights[name] = weight
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, out: Path) -> None:
    """Write the published folder: weights, configuration, tokenizer and chat template, nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(exported_weights(model), out / "model.safetensors", metadata={"format": "pt"})
    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in (END, PAD))
    ids = {"eos_token_id": end, "pad_token_id": pad}
    _write_json(out / "config.json", recipe.config | ids | {"vocab_size": len(tokenizer)})
    _write_json(out / "generation_config.json", ids | {"do_sample": False})
    tokenizer.save_pretrained(out)
    _write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    (out / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def train(recipe: Recipe, number: int, corpus: Corpus, out: Path) -> None:
    """Train one phase from the previous phase's weights, and write the model to `out`."""
    phase = recipe.phases[number]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out) if number else train_tokenizer(corpus)
    model = make_model(recipe.config | {"vocab_size": len(tokenizer)})
    if number:
        load_model(model, checkpoint(out, number - 1))
    optimizer = make_optimizer(model, phase.peak_learning_rate)
    stream = f"train {number}" if number else "train"
    began, seen, recent = time.monotonic(), 0, 0.0
    for step, batch in enumerate(batches(corpus, tokenizer, TOKENS_PER_BATCH, stream, phase.mix), start=1):
        for group in optimizer.param_groups:
            group["lr"] = phase.peak_learning_rate * rate_at(seen / phase.tokens)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        before, seen = seen, seen + batch.inputs.numel()
        recent += loss.item()
        if step % REPORT_EVERY == 0:
            seconds = time.monotonic() - began
            print(
                f"{seen:>9} tokens  loss {recent / REPORT_EVERY:.4f}  {seen / seconds:.0f} tokens/s",
                flush=True,
            )
            recent = 0.0
        if seen // SAVE_EVERY > before // SAVE_EVERY or seen >= phase.end_tokens:
            save(model, tokenizer, recipe, out)
            save_model(model, str(checkpoint(out, number)))
        if seen >= phase.end_tokens:
            return


def checkpoint(out: Path, phase: int) -> Path:
    """Return the path of a phase's float32 weights, next to the folder."""
    return out.with_name(f"{out.name}-phase{phase}.safetensors")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(RECIPES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--first-phase", type=int, default=0, help="go on with this phase")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = RECIPES[arguments.model]
    for number in range(arguments.first_phase, len(recipe.phases)):
        torch.manual_seed(arguments.seed + number)
        train(recipe, number, Corpus(arguments.seed), arguments.out)


if __name__ == "__main__":
    main()
