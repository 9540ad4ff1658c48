"""A GPT-2 with its tied head, trained by DP-SGD on sequences of its own: clip each person's gradient, add noise, step.

Needs `pip install dpformer[hf]`. Random weights, a toy language, a few seconds on a CPU.
"""

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from dpformer import PhantomClipping

torch.manual_seed(0)
people, vocabulary, length = 400, 50, 16
# Everyone counts upwards from some place: the next token is the last one plus one.
text = (torch.randint(0, vocabulary, (people, 1)) + torch.arange(length)) % vocabulary

model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
clipping = PhantomClipping(model, max_norm=1.0)  # the tied head needs nothing special
rate, noise = 0.25, 1.0

for step in range(40):
    batch = text[torch.rand(people) < rate]  # each person is in with the same probability, on their own

    def losses(s=batch):
        logits = model(input_ids=s).logits
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), s[:, 1:], reduction="none").mean(1)

    optimizer.zero_grad()
    clipping.backward(losses)
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p), alpha=noise * clipping.sensitivity)
        p.grad.div_(rate * people)  # the expected number of people, not the one drawn
    optimizer.step()
    if step % 10 == 9:
        with torch.no_grad():
            print(f"step {step + 1}: loss {losses(text).mean():.2f}")
