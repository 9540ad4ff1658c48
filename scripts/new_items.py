"""How often a product that nobody bought yet is recommended to the right people, with `prepare --features` and without.

    python scripts/new_items.py                 # a simulated shop: 8,000 people, 2,000 products, 200 of them new

People have two of 40 categories and buy popular products of them, and at times anything. The new products are in the catalogue
and in nobody's history; the next purchase of every person is one of them, of a category of the person. Prints, for the preset
`transitions` at epsilon 8, median rank and HIT@10 among all products and among the new ones; and of an old product instead.
"""

import tempfile
from pathlib import Path

import numpy as np
import polars as pl

from dpformer import load_model
from dpformer.data import prepare, save
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import start

PEOPLE, PRODUCTS, NEW, CATEGORIES, EVENTS = 8000, 2000, 200, 40, 24


def main() -> None:
    random = np.random.default_rng(1)
    category = random.integers(0, CATEGORIES, PRODUCTS)
    weight = random.pareto(1.2, PRODUCTS) + 0.1
    old, new = np.arange(PRODUCTS - NEW), np.arange(PRODUCTS - NEW, PRODUCTS)
    rows, targets = [], {"new": [], "old": []}

    def draw(among: np.ndarray, of: np.ndarray) -> int:
        chosen = among[np.isin(category[among], of)] if random.random() < 0.8 else among
        return int(random.choice(chosen, p=weight[chosen] / weight[chosen].sum()))

    for person in range(PEOPLE):
        liked = random.choice(category[new], 2)
        rows += [(person, f"p{draw(old, liked)}", time) for time in range(EVENTS)]
        targets["new"].append(int(random.choice(new[np.isin(category[new], liked)])))
        targets["old"].append(draw(old, liked))
    log = pl.DataFrame(rows, schema=["user_id", "item_id", "timestamp"], orient="row")
    products = pl.DataFrame({"item_id": [f"p{n}" for n in range(PRODUCTS)], "category": [f"c{c}" for c in category]})
    histories = log.group_by("user_id", maintain_order=True).agg("item_id")["item_id"].to_list()
    with tempfile.TemporaryDirectory() as folder:
        for features in (None, "category"):
            place = Path(folder) / str(features)
            save(prepare(log, catalogue=products, features=features), place / "data")
            run = start(place / "run", place / "data", make_recipe("transitions", seed=1, hold_out="nothing"))
            run.train()
            model = load_model(place / "run")
            numbers = {name: n for n, name in enumerate(model.catalogue["item_id"].to_list(), 1)}
            best, _ = model.rank([model.encode(history)[0] for history in histories], PRODUCTS)
            is_new = np.isin(best, [numbers[f"p{n}"] for n in new])
            for kind, wanted in targets.items():
                target = best == np.array([numbers[f"p{n}"] for n in wanted])[:, None]
                among = {"all": np.ones_like(is_new), "new": is_new} if kind == "new" else {"all": np.ones_like(is_new)}
                for name, kept in among.items():
                    ranks = np.where(target.any(1), ((np.cumsum(kept, 1) - 1) * target).sum(1), PRODUCTS)
                    hit, middle = 100 * (ranks < 10).mean(), np.median(ranks)
                    print(
                        f"features {features}: {kind} product among {name}: HIT@10 {hit:.2f} %, median rank {middle:.0f}"
                    )


if __name__ == "__main__":
    main()
