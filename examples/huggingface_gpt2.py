"""A tied GPT-2 from Hugging Face, trained on text grouped by author with differential privacy: some seconds on a CPU.

    python examples/huggingface_gpt2.py [FOLDER of a checkpoint, as `save_pretrained` writes it]

Needs `pip install 'dpformer[hf]'`. Without a folder the model is small, from random weights, and reads bytes. The text ships with
the package: titles that 3,000 invented readers wrote down. A reader with all titles is one sample.
"""

import sys
import tempfile

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from dpformer import PrivateTraining
from dpformer.data import demo_frame

records = demo_frame().sort("timestamp").select("user_id", "title").to_dicts()  # one record for each title
length, end = 48, ord("\n")

torch.manual_seed(0)  # of the initial weights; the draws and the noise have keys of their own
if len(sys.argv) > 1:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    encode, decode, end = tokenizer.encode, tokenizer.decode, tokenizer.eos_token_id
else:
    sizes = {"n_positions": length, "n_embd": 48, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=end, eos_token_id=end, **sizes))
    encode, decode = lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace")
model.eval()  # no dropout


def collate(people):  # a list of each person's records; all texts have the same length, whatever the others wrote
    texts = [encode("; ".join(record["title"] for record in own))[:length] for own in people]
    return torch.tensor([text + [end] * (length - len(text)) for text in texts])


def losses(batch):  # one for each person: the mean over the person's own positions
    logits = model(input_ids=batch).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch[:, 1:], reduction="none").mean(1)


def write():
    start = torch.tensor([encode("The H")])
    written = model.generate(
        start, attention_mask=torch.ones_like(start), max_length=24, do_sample=False, pad_token_id=end
    )
    return decode(written[0].tolist()).strip()


print("before it writes:", write())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 if len(sys.argv) == 1 else 1e-4)
with tempfile.TemporaryDirectory() as folder:  # keep the folder in a real run: the same program goes on from there
    private = PrivateTraining(
        *(model, optimizer, records),
        **{"epsilon": 8.0, "delta": 1e-5, "batch_size": 200, "steps": 40, "run": f"{folder}/run", "micro_batch": 64},
        **{"person": "user_id", "records_per_person": 20, "collate_fn": collate},
    )
    for batch in private:
        if private.step(lambda: losses(batch)) and private.steps_made % 10 == 0:  # noqa: B023
            loss = private.report.loss / private.report.users  # computed without noise: for you, not for publication
            print(f"step {private.steps_made} of {private.plan.steps}: loss {loss:.2f} (not private)")
    print(private.statement.text().splitlines()[0])
    print(private.movement.text())
print("after it writes:", write())
