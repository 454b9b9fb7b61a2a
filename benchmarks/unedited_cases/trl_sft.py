"""trl: SFTTrainer on a small Llama with ready token ids."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{k}": k for k in range(3, 60)}}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, "<pad>")),
    pad_token="<pad>", bos_token="<s>", eos_token="</s>",
)  # fmt: skip
config = LlamaConfig(
    vocab_size=60, hidden_size=96, intermediate_size=192, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
rows = [
    {"input_ids": [1, *(3 + (i + 2 * k) % 57 for k in range(12 + i % 13)), 2]} for i in range(160)
]
arguments = SFTConfig(
    output_dir="out", per_device_train_batch_size=8, num_train_epochs=1, learning_rate=1e-3,
    logging_steps=5, report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
)  # fmt: skip
trainer = SFTTrainer(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
)
print(f"loss {trainer.train().training_loss:.5f}")
