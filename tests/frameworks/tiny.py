"""A model, a tokenizer and a data set that are as small as they can be, made on the spot.

    python tests/frameworks/tiny.py FOLDER

writes FOLDER/model, FOLDER/train.parquet and FOLDER/val.parquet. Needs an environment with torch, transformers, pandas.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPTS: Final = 4096
"""More than any test uses, so that no data set ends before its job."""


def tiny_assets(cache: Path) -> Path:
    """A folder with the model and data, made once for each content of this file (and environment)."""
    key = sha256(Path(__file__).read_bytes() + sys.prefix.encode()).hexdigest()[:12]
    target = cache / f"tiny-{key}"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        draft = cache / f"tiny-{key}.{os.getpid()}"
        # A process of its own: torch and transformers stay out of the one that watches.
        subprocess.run([sys.executable, __file__, str(draft)], check=True, timeout=300)
        try:
            draft.rename(target)
        except OSError:  # somebody else was first
            shutil.rmtree(draft)
    return target


def make_model(folder: Path) -> None:
    """A Qwen2 of 2 layers with random weights (seed 0), and a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        [f"what is {a} + {b} ? user assistant {a + b}" for a in range(10) for b in range(10)],
        trainers.BpeTrainer(
            vocab_size=384,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=SPECIAL[2], pad_token=SPECIAL[0], model_max_length=512
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        **ends,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    GenerationConfig(do_sample=True, **ends).save_pretrained(folder)


def make_rows(n: int) -> list[dict[str, Any]]:
    """Sums of two digits, in the columns that verl's data sets have."""
    rng = random.Random(0)
    rows = []
    for index in range(n):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        rows.append(
            {
                "data_source": "toy/add",
                "prompt": [{"role": "user", "content": f"what is {a} + {b} ?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": "train", "index": index},
            }
        )
    return rows


def make(folder: Path) -> None:
    import pandas as pd

    folder.mkdir(parents=True)
    make_model(folder / "model")
    rows = make_rows(PROMPTS)
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
