"""From the embedded log to ranked items: the private model learns, and the one without privacy learns more."""

import pytest

from dpformer import load_model
from dpformer.data import load, prepare_named, save
from dpformer.data.named import DEMO
from dpformer.evaluation import evaluate, held_out
from dpformer.fit.run import start
from dpformer.fit.scorers import count_events
from tests.recipes import plain_recipe


def test_a_private_model_beats_popularity_and_a_model_without_privacy_beats_both(tmp_path):
    save(prepare_named(DEMO), tmp_path / "data")
    dataset = load(tmp_path / "data")
    held, items = held_out(dataset.sequences, "test"), len(dataset.catalogue)
    popular = count_events(held.histories, items)
    found = {"popularity": evaluate(popular, held, items)}
    for epsilon in (8.0, float("inf")):
        recipe = plain_recipe(epsilon=epsilon, epochs=20.0, seed=1)
        assert start(tmp_path / str(epsilon), tmp_path / "data", recipe).train()
        model = load_model(tmp_path / str(epsilon))
        found[str(epsilon)] = evaluate(model, held, items)
        assert model.statement.private == (epsilon == 8.0)
        assert model.statement.epsilon == ("inf" if epsilon != 8.0 else pytest.approx(8.0, rel=2e-3))
    ndcg = {name: figures.masked["ndcg@10"] for name, figures in found.items()}
    assert ndcg["8.0"].low > 1.3 * ndcg["popularity"].high, ndcg
    assert ndcg["inf"].low > ndcg["8.0"].high, ndcg
