"""peft: LoRA on a small GPT-2, saved as an adapter."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
base = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=48, n_embd=192, n_layer=3, n_head=4))
config = LoraConfig(
    r=8, lora_alpha=16, target_modules=["c_attn"], lora_dropout=0.1, task_type="CAUSAL_LM"
)
model = get_peft_model(base, config)
model.print_trainable_parameters()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
text = (torch.randint(0, 100, (192, 1)) + 3 * torch.arange(48)) % 100
model.train()
for step, batch in enumerate(text.split(8)):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 6 == 0:
        print(f"step {step}: {loss.item():.5f}")
model.save_pretrained("adapter")
