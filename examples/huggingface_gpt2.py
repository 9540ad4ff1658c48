"""A tied GPT-2 from Hugging Face, trained on text with user-level differential privacy: some seconds on a CPU.

Needs `pip install 'dpformer[hf]'`. The text ships with the package: what each of 3,000 invented readers read, title after title,
as bytes. A reader's text is one sample, so the guarantee is for a reader with all that they wrote. Random weights: no download.
"""

import tempfile

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from dpformer import PhantomClipping
from dpformer.data import demo_frame
from dpformer.fit.module_sum import ModuleGradientSum
from dpformer.privacy import Curator, Keys, create_ledger, make_plan

# Everyone's titles, oldest first, cut or filled up to 48 bytes.
texts = demo_frame().sort("timestamp").group_by("user_id").agg("title")["title"].to_list()
length, end = 48, ord("\n")
text = torch.tensor([list("; ".join(titles).encode()[:length].ljust(length, b"\n")) for titles in texts])

torch.manual_seed(0)
sizes = {"n_positions": length, "n_embd": 48, "n_layer": 1, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=end, eos_token_id=end, **sizes)).eval()  # no dropout


def losses(people, drawn):
    s = people[drawn]
    logits = model(input_ids=s).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), s[:, 1:], reduction="none").mean(1)


# The private part: a plan, a clipping, and the Curator, which draws people, charges the ledger and adds noise.
plan = make_plan(users=len(text), epsilon=8.0, delta=1e-5, batch_size=200, steps=40)
query = ModuleGradientSum(PhantomClipping(model, max_norm=1.0), losses, plan)  # the tied head needs nothing special
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
with tempfile.TemporaryDirectory() as folder, create_ledger(folder, plan) as ledger:  # keep the folder in a real run
    curator = Curator(text, plan, ledger, Keys())
    for step in range(1, plan.steps + 1):
        answer = curator.ask(query)
        for name, p in model.named_parameters():
            p.grad = torch.from_numpy(answer.values[name] / plan.batch_size).float()  # the expected number of people
        optimizer.step()
        if step % 10 == 0:
            with torch.no_grad():  # computed without noise: for you, not for publication
                loss = losses(text, torch.arange(200)).mean()
            print(f"step {step} of {plan.steps}: loss {loss:.2f} (not private)")

start = torch.tensor([list(b"The H")])
written = model.generate(start, max_length=length, do_sample=False, pad_token_id=end)
print(f"epsilon {plan.total.epsilon:.2f} at delta {plan.delta:g}, for each reader")
print("it writes:", bytes(written[0].tolist()).decode(errors="replace").strip())
