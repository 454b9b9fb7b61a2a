"""transformers: a loop over a small Llama, then generate() with its cache."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
start = torch.randint(3, 64, (16 * 24, 1))
text = 3 + (start + 5 * torch.arange(32)) % 61
for step, batch in enumerate(text.split(16)):
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step}: loss {loss.item():.5f}")
model.eval()
prompts = text[:6, :8]
print(model.generate(prompts, max_new_tokens=12, do_sample=False).tolist())
print(model.generate(prompts, max_new_tokens=8, do_sample=True, top_k=5).tolist())
