"""The statistics without a run are those of a run."""

import torch

from dpformer.artifact import load as load_artifact
from dpformer.data import load
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import start
from dpformer.fit.scorers import to_scorer
from dpformer.statistics.settings import TransitionSettings
from dpformer_experiments.curators import seeded_curator
from dpformer_experiments.transition_answers import measure_transitions, transition_shares


def test_the_answers_of_a_curator_make_the_model_of_a_run(demo, tmp_path):
    settings, recipe = TransitionSettings(), make_recipe("transitions", seed=3)
    assert transition_shares(settings) == recipe.shares()
    start(tmp_path / "run", demo["demo"], recipe).train()
    released = load_artifact(tmp_path / "run").model.state_dict()
    dataset = load(demo["demo"])
    people = dataset.train(recipe.hold_out)
    with seeded_curator(people, recipe.plan(len(people)), 3) as curator:
        own = to_scorer(
            measure_transitions(curator, len(dataset.catalogue), len(people), settings), settings
        ).state_dict()
    for name, value in released.items():
        torch.testing.assert_close(own[name], value, msg=name)
