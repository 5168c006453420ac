"""Write a language model of two layers with its tokenizer to `model`, and sentences for it to `data`."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sentences = [f"the square of {number} is {number * number}" for number in range(320)]
tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
special = ["<unk>", "<pad>", "<eos>"]
tokenizer.train_from_iterator(sentences, trainers.BpeTrainer(vocab_size=256, special_tokens=special))
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
fast.save_pretrained("model")

config = Qwen3Config(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    pad_token_id=1,
    eos_token_id=2,
)
Qwen3ForCausalLM(config).save_pretrained("model")

Path("data").mkdir()
lines = [json.dumps({"text": sentence}) for sentence in sentences]
Path("data", "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
