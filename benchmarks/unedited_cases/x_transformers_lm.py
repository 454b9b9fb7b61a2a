"""x-transformers: AutoregressiveWrapper on a decoder, generate."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.manual_seed(0)
model = AutoregressiveWrapper(
    TransformerWrapper(
        num_tokens=64, max_seq_len=64, attn_layers=Decoder(dim=128, depth=3, heads=4)
    )
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    batch = (torch.randint(0, 64, (12, 1)) + 5 * torch.arange(33)) % 64
    loss = model(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
model.eval()
print(model.generate(batch[:2, :8], 8, temperature=0.0).tolist())
