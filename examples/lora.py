"""LoRA adapters on a GPT-2, trained on text grouped by author with differential privacy: some seconds on a CPU.

    python examples/lora.py [FOLDER of a checkpoint, as `save_pretrained` writes it]

Needs `pip install 'dpformer[hf]' peft`. Only the adapters are trained, clipped and noised; the frozen weights cost nothing.
"""

import sys
import tempfile

import peft
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
    base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    encode, end = tokenizer.encode, tokenizer.eos_token_id
else:
    sizes = {"n_positions": length, "n_embd": 32, "n_layer": 1, "n_head": 2}
    base = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=end, eos_token_id=end, **sizes))
    encode = lambda text: list(text.encode())  # noqa: E731
config = peft.LoraConfig(r=8, target_modules=["c_attn", "c_fc"], modules_to_save=["ln_f"], fan_in_fan_out=True)
model = peft.get_peft_model(base, config).eval()  # no dropout
model.print_trainable_parameters()


def collate(people):  # a list of each person's records; all texts have the same length, whatever the others wrote
    texts = [encode("; ".join(record["title"] for record in own))[:length] for own in people]
    return torch.tensor([text + [end] * (length - len(text)) for text in texts])


def losses(batch):  # one for each person: the mean over the person's own positions
    logits = model(input_ids=batch).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch[:, 1:], reduction="none").mean(1)


optimizer = torch.optim.Adam(
    (p for p in model.parameters() if p.requires_grad), lr=2e-2 if len(sys.argv) == 1 else 1e-4
)
with tempfile.TemporaryDirectory() as folder:  # keep the folder in a real run: the same program goes on from there
    private = PrivateTraining(
        *(model, optimizer, records),
        **{"epsilon": 8.0, "delta": 1e-5, "batch_size": 200, "steps": 20, "run": f"{folder}/run", "micro_batch": 64},
        **{"person": "user_id", "records_per_person": 20, "collate_fn": collate},
    )
    for batch in private:
        if private.step(lambda: losses(batch)) and private.steps_made % 10 == 0:  # noqa: B023
            loss = private.report.loss / private.report.users  # computed without noise: for you, not for publication
            print(f"step {private.steps_made} of {private.plan.steps}: loss {loss:.2f} (not private)")
    print(private.statement.text().splitlines()[0])
    print(private.movement.text())
    model.save_pretrained(f"{folder}/adapters")  # the adapters alone
