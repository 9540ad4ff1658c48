"""A tour of a private recommender, cell by cell. Run it whole, or open it as a notebook: many editors know `# %%`."""

# %% [markdown]
# # From people's reading to private recommendations
# The embedded data set: 3,000 invented readers, 500 invented books, a long tail.

# %%
import tempfile
from pathlib import Path

import polars as pl

from dpformer import DPFormer
from dpformer.data import demo_frame
from dpformer.privacy import attack_bound, make_plan
from dpformer.report import make_report

frame = demo_frame()  # or your own: pandas, polars, Arrow, or the path of a file
print(frame.head())
print(frame.group_by("title").len().sort("len", descending=True).head(3))

# %% [markdown]
# ## What does a budget mean?
# Before anything is trained, ask what an attacker could do at a given epsilon.

# %%
users = frame["user_id"].n_unique()
for epsilon in (1.0, 8.0):
    plan = make_plan(users, epsilon, 1e-5, batch_size=users // 2, epochs=4)
    print(
        f"epsilon {epsilon:g}: noise {plan.noise_multiplier:.2f} a step.",
        attack_bound(plan.charges(), 1e-5).sentence(),
    )

# %% [markdown]
# ## Train
# Statistics take seconds and are strong: preset `transitions`. By default a Transformer learns from them, at no cost of budget.
# Preset `whole` trains a Transformer by DP-SGD beside them, one budget for both: four epochs are for this tour.

# %%
counts = DPFormer("transitions", epsilon=8).fit(frame, title="title")
network = DPFormer("whole", epsilon=8, epochs=4).fit(frame, title="title")
print(counts.privacy.text().splitlines()[0])

# %% [markdown]
# ## How good are they?
# The last book of everybody is held out and all books are ranked. These figures come from people's data without noise: they are
# for you, not for publication.

# %%
for name, model in {"transitions": counts, "transformer": network}.items():
    found = model.evaluate()
    everybody, tail = found.masked["ndcg@10"], found.slices["tail"].metrics["ndcg@10"]
    print(f"{name}: NDCG@10 {100 * everybody.value:.1f} %; where the book is a rare one: {100 * tail.value:.1f} %")
print(found.protocol.line())

# %% [markdown]
# ## Recommend
# For anybody, also for people whom the model has never seen. Their history is used for the answer and not learned from.

# %%
answer = counts.recommend(histories=[["The Harbour Mysteries, vol. 1", "The Harbour Mysteries, vol. 2"], []], k=3)
print(answer.filter(pl.col("history") == 0))

# %% [markdown]
# ## Keep it, and show it to others
# The folder holds the model, its catalogue and its privacy statement; `dpformer serve` serves it. The report is one HTML file.

# %%
with tempfile.TemporaryDirectory() as place:
    counts.save(Path(place) / "counts")
    page = Path(place) / "report.html"
    page.write_text(make_report([Path(place) / "counts"]).html)
    again = DPFormer.load(Path(place) / "counts")
    assert again.recommend(histories=[["book-010"]], k=3).equals(counts.recommend(histories=[["book-010"]], k=3))
    print(
        f"{len(list((Path(place) / 'counts').iterdir()))} files in the folder, a report of {page.stat().st_size // 1000} kB"
    )
