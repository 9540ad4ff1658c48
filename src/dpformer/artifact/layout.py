"""The files of a run folder: their names, and the version of the format.

config.json         format, versions, recipe                      items.jsonl       the catalogue
model.json          the spec of the released model                privacy.json      the privacy statement
model.safetensors   its tensors                                   README.md         the model card
files.json          SHA-256 of what is released                   ledger.jsonl      what was charged, before it was seen
ledger.head         number and hash of the ledger's last line
events.jsonl        progress; losses are not private              metrics.json      evaluation; not private
answers/            the noisy answers, for verify; may be published
run.lock            keeps a second process out                    local.json        where the data was; owner only
private/            state of an unfinished run; owner only, removed at the end
"""

from __future__ import annotations

CONFIG, SPEC, MODEL, ITEMS = "config.json", "model.json", "model.safetensors", "items.jsonl"
PRIVACY, CARD, LEDGER, LEDGER_HEAD = "privacy.json", "README.md", "ledger.jsonl", "ledger.head"
# Detects damage, not forgery: who forges a file can forge its hash.
FILES = "files.json"
# What may be copied from a run folder; every other file may hold figures without noise. The model last: it makes a folder whole.
RELEASED = (CONFIG, SPEC, ITEMS, PRIVACY, CARD, FILES, LEDGER, LEDGER_HEAD, MODEL)
EVENTS, METRICS = "events.jsonl", "metrics.json"
# Not part of the model, and without a hash of the data, which would confirm a guess.
LOCAL = "local.json"
LOCK = "run.lock"
# The settings of a run of PrivateTraining, which has no other of these files but the statement, the ledger and weights.
TRAINING = "training.json"
# Noisy and charged, so as public as the model; left out of copies, because they are larger than it.
ANSWERS = "answers"
# What earlier runs released, as a prior of a refitted one.
PRIOR = "prior.safetensors"
# Secret state; the release is written aside in there, before the secrets are removed.
PRIVATE, CHECKPOINT, RELEASE = "private", "checkpoint-", "release"

FORMAT = "dpformer-run"
# Format 1 had floating-point noise; see docs/privacy.md.
VERSION = 2
OLD_FORMAT = (
    "was made by an older version, whose floating-point noise leaks: a released model tells who was in the data, whatever its "
    "statement says; do not publish it, and fit again"
)
