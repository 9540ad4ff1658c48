"""How often a product that nobody bought yet is recommended to the right people, with `prepare --features` and without.

    python scripts/new_items.py                 # a simulated shop: 8,000 people, 2,000 products, 200 of them new
    python scripts/new_items.py --small         # 3,000 people, 400 books, 20 of them new: a head that holds all; 3 seeds

In the large shop people have two of 40 categories and buy popular products of them, and at times anything. The new products are
in the catalogue and in nobody's history; the next purchase of every person is one of them, of a category of the person. Prints,
for the preset `transitions` at epsilon 8, median rank and HIT@10 among all products and among the new ones; and of an old product
instead.

In the small one people stay in one of 5 categories with probability 0.9, and half of the books are in series of five volumes,
which most people read in order. Prints, at epsilon 6, how many of the four best new books are of the category of a person's last
book (chance: 20 %), and NDCG@10 of the next book, which is an old one.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

from dpformer import load_model
from dpformer.data import prepare, save
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import start


def rank_all(
    histories: list, category: np.ndarray, features: str | None, preset: str, **settings: object
) -> np.ndarray:
    """Fit on histories of product numbers; returns all products by rank, [people, products], -1 after the last."""
    rows = [(who, f"p{n}", t) for who, history in enumerate(histories) for t, n in enumerate(history)]
    log = pl.DataFrame(rows, schema=["user_id", "item_id", "timestamp"], orient="row")
    products = pl.DataFrame(
        {"item_id": [f"p{n}" for n in range(len(category))], "category": [f"c{c}" for c in category]}
    )
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder) / "data", Path(folder) / "run"
        save(prepare(log, catalogue=products, features=features), data)
        start(run, data, make_recipe(preset, hold_out="nothing", **settings)).train()
        model = load_model(run)
        numbers = np.array([-1, *(int(name[1:]) for name in model.catalogue["item_id"])])
        return numbers[
            model.rank([model.encode([f"p{n}" for n in history])[0] for history in histories], len(category))[0]
        ]


def large() -> None:
    people, count, fresh, categories, events = 8000, 2000, 200, 40, 24
    random = np.random.default_rng(1)
    category = random.integers(0, categories, count)
    weight = random.pareto(1.2, count) + 0.1
    old, new = np.arange(count - fresh), np.arange(count - fresh, count)
    histories, targets = [], {"new": [], "old": []}

    def draw(among: np.ndarray, of: np.ndarray) -> int:
        chosen = among[np.isin(category[among], of)] if random.random() < 0.8 else among
        return int(random.choice(chosen, p=weight[chosen] / weight[chosen].sum()))

    for _ in range(people):
        liked = random.choice(category[new], 2)
        histories.append([draw(old, liked) for _ in range(events)])
        targets["new"].append(int(random.choice(new[np.isin(category[new], liked)])))
        targets["old"].append(draw(old, liked))
    for features in (None, "category"):
        best = rank_all(histories, category, features, "transitions", seed=1)
        for kind, among in (("new", "all"), ("new", "new"), ("old", "all")):
            kept = best >= old.size if among == "new" else np.ones_like(best, dtype=bool)
            target = best == np.array(targets[kind])[:, None]
            ranks = np.where(target.any(1), ((np.cumsum(kept, 1) - 1) * target).sum(1), count)
            hit, middle = 100 * (ranks < 10).mean(), np.median(ranks)
            print(f"features {features}: {kind} product among {among}: HIT@10 {hit:.2f} %, median rank {middle:.0f}")


def small() -> None:
    people, count, fresh, categories, volumes = 3000, 400, 20, 5, 5
    category, old = np.arange(count) % categories, count - fresh
    for preset in ("transitions", "distilled"):
        for features in (None, "category"):
            figures = []
            for seed in (1, 2, 3):
                random = np.random.default_rng(seed)
                weight = random.pareto(1.2, count) + 0.1
                weight[old:] = 0.0
                following = np.full(count, -1)
                for c in range(categories):
                    own = random.permutation(np.flatnonzero(category[:old] == c))
                    for series in own[: own.size // 2 // volumes * volumes].reshape(-1, volumes):
                        following[series[:-1]] = series[1:]
                        weight[series[1:]] *= 0.2
                histories = []
                for _ in range(people):
                    home, history, left = random.integers(categories), [], weight.copy()
                    for _ in range(random.integers(7, 22)):
                        item = following[history[-1]] if history else -1
                        if item < 0 or not left[item] or random.random() > 0.85:
                            chosen = home if random.random() < 0.9 else random.integers(categories)
                            p = left * (category == chosen)
                            item = random.choice(count, p=p / p.sum())
                        history.append(int(item))
                        left[item] = 0.0
                    histories.append(history)
                best = rank_all([h[:-1] for h in histories], category, features, preset, seed=seed, epsilon=6.0)
                rank = np.argmax(best == np.array([h[-1] for h in histories])[:, None], 1)
                first = best[best >= old].reshape(people, fresh)[:, :4]
                right = (category[first] == category[[h[-2] for h in histories]][:, None]).mean()
                figures.append((100 * right, 100 * np.where(rank < 10, 1 / np.log2(rank + 2), 0).mean()))
            (right, ndcg), each = np.mean(figures, 0), ", ".join(f"{a:.0f} / {b:.2f}" for a, b in figures)
            print(f"{preset}, features {features}: {right:.0f} % right, NDCG@10 {ndcg:.2f} (seeds: {each})", flush=True)


if __name__ == "__main__":
    small() if "--small" in sys.argv[1:] else large()
