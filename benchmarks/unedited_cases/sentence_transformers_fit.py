"""sentence-transformers: MultipleNegativesRankingLoss in a loop over pairs."""

import torch
from sentence_transformers import SentenceTransformer, losses, models
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

torch.manual_seed(0)
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{k}" for k in range(60))]
tokenizer = Tokenizer(WordLevel({w: k for k, w in enumerate(words)}, "[UNK]"))
tokenizer.pre_tokenizer = Whitespace()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
    sep_token="[SEP]", mask_token="[MASK]", model_max_length=32,
).save_pretrained("base")  # fmt: skip
BertModel(BertConfig(
    vocab_size=len(words), hidden_size=96, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=192,
)).save_pretrained("base")  # fmt: skip
encoder = models.Transformer("base", max_seq_length=32)
model = SentenceTransformer(modules=[encoder, models.Pooling(96)], device="cpu")
loss_model = losses.MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
model.train()
for step in range(16):
    starts = torch.randperm(50)[:16].tolist()
    pairs = [
        [" ".join(f"w{(s + j) % 60}" for j in range(6)) for s in starts],
        [" ".join(f"w{(s + j + 1) % 60}" for j in range(6)) for s in starts],
    ]
    features = [model.tokenize(side) for side in pairs]
    loss = loss_model(features, None)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
print(f"{abs(model.encode(['w1 w2 w3', 'w4 w5'])).mean():.5f}")
