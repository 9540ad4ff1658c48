"""Recipes: presets, settings by name, errors with a cure, what is stored and read back, and what to type for a recipe."""

import json
from pathlib import Path
from typing import Any

import pytest

from dpformer.errors import DPFormerError
from dpformer.fit.folder import read_recipe
from dpformer.fit.presets import NOT_PRIVATE, PRESETS, command, make_recipe
from dpformer.fit.recipe import (
    STAGES,
    DistilSettings,
    DPSGDSettings,
    HistogramSettings,
    NetworkSettings,
    Recipe,
    Tuning,
)
from dpformer.fit.run import resume, start
from dpformer.models import Network, build, recommender
from dpformer.models.network import NetworkSpec
from dpformer.privacy.plan import steps_of
from tests.recipes import small_recipe

TRAINING = Path(__file__).parent.parent.parent / "docs" / "training.md"
INF = float("inf")


# Settings by name


def test_settings_from_preset_file_and_options(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('learning_rate = 0.5\nepsilon = inf\n[network]\nmodel = "gru"\nreattention = "off"\n')
    recipe = make_recipe("paper", file, model="lstm")
    network, steps = recipe.network, recipe.stage(DPSGDSettings)
    assert (network.d, steps.learning_rate, network.model, recipe.epsilon) == (64, 0.5, "lstm", INF)
    assert make_recipe() == make_recipe("default") == Recipe.model_validate(PRESETS["default"])


def test_an_earlier_name_of_a_preset_still_works():
    assert make_recipe("pure", d=8) == make_recipe("dpformer", d=8)
    assert command(make_recipe("pure"))["preset"] == "dpformer"


@pytest.mark.parametrize(
    ("users", "batch", "steps"),
    [(6_040, 1_510, 80), (14_999, 3_749, 81), (15_000, 7_500, 80), (31_013, 15_506, 81), (600_000, 16_000, 80)],
)
def test_the_default_batch_and_steps_are_functions_of_the_number_of_users(users, batch, steps):
    """Those of MovieLens-1M (6,040) and Amazon Games (31,013) are of published runs."""
    settings = DPSGDSettings()
    assert settings.batch_of(users) == batch
    assert steps_of(settings.epochs_of(users), users, batch) == steps
    given = DPSGDSettings(batch_size=users // 3)
    assert given.epochs_of(users) == (20 if users < 15_000 else 40)


def test_the_default_batch_never_falls_with_more_users():
    batches = [DPSGDSettings().batch_of(users) for users in range(1, 100_000, 37)]
    assert batches == sorted(batches)
    assert DPSGDSettings().batch_of(2) == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_recipe(preset):
    recipe = make_recipe(preset)
    assert sum(recipe.shares().values()) == pytest.approx(1) or recipe.steps_on_data
    if preset in ("dpformer", "paper"):
        assert not make_recipe(preset, epsilon=INF).plan(100).private
        return
    with pytest.raises(DPFormerError, match="take preset dpformer or paper"):
        make_recipe(preset, epsilon=INF)


@pytest.mark.parametrize("preset", NOT_PRIVATE)
@pytest.mark.parametrize("epsilon", [INF, "inf"])
def test_a_preset_without_privacy_is_a_recipe_at_epsilon_inf(preset, epsilon):
    recipe = make_recipe(preset, epsilon=epsilon)
    assert not recipe.plan(100).private
    assert recipe.network.d >= 64
    assert recipe.network.dropout > 0
    assert typed(recipe) == recipe
    assert command(recipe) == {"preset": preset, "epsilon": "inf", "set": {}}
    changed = make_recipe(preset, epsilon=epsilon, epochs=3)
    assert typed(changed) == changed
    assert command(changed)["set"] == {"dpsgd.epochs": 3.0}


@pytest.mark.parametrize("preset", NOT_PRIVATE)
@pytest.mark.parametrize("options", [{}, {"epsilon": 8.0}, {"epsilon": 1e9, "dropout": 0.0}])
def test_a_preset_without_privacy_is_refused_with_any_other_epsilon(preset, options, tmp_path, data, dpformer):
    with pytest.raises(DPFormerError, match="give epsilon inf, or take preset='dpformer'"):
        make_recipe(preset, **options)
    typed = ["--epsilon", options["epsilon"]] if "epsilon" in options else []
    done = dpformer("fit", data, "--run", tmp_path / "run", "--preset", preset, *typed)
    assert done.code == 2
    assert "give epsilon inf, or take --preset dpformer" in " ".join(done.err.split())
    assert not (tmp_path / "run").exists()


def test_a_private_recipe_is_never_typed_as_a_preset_without_privacy():
    own = {"d": 64, "blocks": 2, "dropout": 0.2, "max_length": 200, "vocabulary": None, "recency": None}
    near = make_recipe("dpformer", **own, batch_size=128, learning_rate=2e-3)
    assert command(near)["preset"] in PRESETS


@pytest.mark.parametrize(
    ("preset", "name", "value", "place"),
    [
        ("dpformer", "epochs", 3.0, "dpsgd.epochs"),
        ("dpformer", "dpsgd.epochs", 3.0, "dpsgd.epochs"),
        ("dpformer", "share", 0.2, "histogram.share"),
        ("distilled", "steps", 7, "distil.steps"),
        ("default", "transitions.share", 0.2, "transitions.share"),
        ("default", "transitions", {"share": 0.2}, "transitions.share"),
        ("default", "weight", 0.2, "transitions.weight"),
        ("paper", "network", {"d": 9}, "network.d"),
        ("popularity", "delta", 1e-7, "delta"),
    ],
)
def test_a_setting_by_its_name_or_with_its_group(preset, name, value, place):
    value_set = next(iter(value.values())) if isinstance(value, dict) else value
    recipe = make_recipe(preset, **{name: value})
    assert recipe == make_recipe(preset).changed({place: value_set}) != make_recipe(preset)


def test_a_recipe_is_changed_where_it_has_the_setting():
    recipe = make_recipe("transitions")
    assert recipe.changed({"network.d": 8, "dpsgd.epochs": 2.0, "seed": 4}) == make_recipe("transitions", seed=4)
    assert make_recipe("distilled").stage(DistilSettings).steps == 120
    assert make_recipe("distilled").stage(DPSGDSettings) is None
    assert make_recipe().stage(DPSGDSettings) is not None


def test_stages_replace_those_of_the_preset():
    recipe = make_recipe("dpformer", stages=[{"stage": "dpsgd", "epochs": 3}], vocabulary=None)
    assert [stage.stage for stage in recipe.stages] == ["dpsgd"]
    assert recipe.shares() == {}
    recipe = make_recipe("dpformer", stages=[{"stage": "histogram"}, {"stage": "dpsgd"}], epochs=4)
    assert recipe.stage(DPSGDSettings).epochs == 4
    assert recipe.stage(HistogramSettings).share == 0.03


@pytest.mark.parametrize(
    ("preset", "name", "others"),
    [
        ("distilled", "epochs", "default, dpformer, paper"),
        ("distilled", "dpsgd.epochs", "default, dpformer, paper"),
        ("dpformer", "distil.steps", "distilled"),
        ("dpformer", "weight", "default, distilled, transitions"),
        ("paper", "transitions.weight", "default, distilled, transitions"),
        ("transitions", "network.d", "default, dpformer, distilled, paper"),
        ("popularity", "d", "default, dpformer, distilled, paper"),
    ],
)
def test_a_setting_that_the_preset_lacks_names_presets_that_have_it(preset, name, others):
    with pytest.raises(DPFormerError, match=rf"which preset '{preset}' does not have; presets that have it: {others}$"):
        make_recipe(preset, **{name: 1})
    for other in others.split(", "):
        make_recipe(other, **{name: 1})


@pytest.mark.parametrize("preset", ["distilled", "default", "transitions"])
def test_an_ambiguous_name_is_refused(preset):
    with pytest.raises(DPFormerError, match=r"give histogram\.share or transitions\.share$"):
        make_recipe(preset, share=0.5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("learning_rat", "unknown setting 'learning_rat'; did you mean 'learning_rate'?"),
        ("dpsgd.epoch", "unknown setting 'dpsgd.epoch'; did you mean 'epochs'?"),
        ("network.epochs", "unknown setting 'network.epochs'"),
        ("dpsgd.stage", "unknown setting 'dpsgd.stage'"),
        ("network", "unknown setting 'network'"),
        ("nothing.d", "unknown setting 'nothing.d'"),
        ("qqqq", "unknown setting 'qqqq'"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(name, message):
    with pytest.raises(DPFormerError) as error:
        make_recipe("dpformer", **{name: 1})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("kind", ["transitions", "popularity"])
def test_a_model_that_is_a_preset_now(kind):
    with pytest.raises(DPFormerError, match=f"model {kind} is a preset now: use preset='{kind}'"):
        make_recipe(model=kind)


@pytest.mark.parametrize("preset", ["best", "joined"])
def test_presets_of_earlier_versions_name_those_of_now(preset):
    with pytest.raises(
        DPFormerError, match=f"no preset is called '{preset}'; there are: {', '.join(PRESETS | NOT_PRIVATE)}"
    ):
        make_recipe(preset)


# Wrong values, as a file of settings for preset dpformer


WRONG = [
    ("learning_rate = nan", "setting 'dpsgd.learning_rate'"),
    ("learning_rate = inf", "setting 'dpsgd.learning_rate'"),
    ("dropout = 1.0", "setting 'network.dropout'"),
    ("d = 2.5", "setting 'network.d'"),
    ("d = 10\nheads = 3", "unknown setting 'heads'"),
    ("epsilon = 0", "setting 'epsilon'"),
    ("epsilon = nan", "epsilon"),
    ("[model]\nx = 1", "unknown setting 'model.x'"),
    ("[network.d]\nx = 1", "setting 'network.d'"),
    ('noise = "crypto"', "unknown setting 'noise'"),
    ("seed = -1", "setting 'seed'"),
    ("seed = 9223372036854775808", "setting 'seed'"),
    ("batch_size = 0", "setting 'dpsgd.batch_size'"),
    ('model = "gru"\nreattention = "logits"', "reattention is for the transformer"),
    ('reattention = "logits"\nvocabulary = "none"\nstages = [{stage = "dpsgd"}]', "reattention corrects the noise"),
    ('vocabulary = 5\nstages = [{stage = "dpsgd"}]', "a vocabulary needs item frequencies"),
    ('model = "gru"\nrecency = 1.0', "recency is for the transformer"),
    ('stages = [{stage = "histogram", share = 1.0}]', "a network goes with the stages distil and dpsgd"),
    ("vocabulary = 0", "setting 'network.vocabulary'"),
    ("d = ", "is not TOML"),
    ("delta = 0.5", "delta"),
    ("epochs = 1e-9\nmax_norm = -1", "setting 'dpsgd.max_norm'"),
    ("stages = 3", "stages must be a list"),
    ('stages = ["histogram"]', "stages must be a list"),
    ('stages = [{stage = "train"}]', "there are: histogram, transitions, distil, dpsgd"),
    ("stages = [{share = 0.3}]", "stages must be a list"),
    ("[stages]\nx = 1", "stages must be a list"),
    ('stages = [{stage = "dpsgd", epoch = 3}]', "setting 'dpsgd.epoch'"),
    ('tuning = "listed"', "goes with configurations"),
    ('[tuning]\nkind = "none"\nconfigurations = ["a"]', "goes with configurations"),
    ('tuning = "some"', "setting 'tuning.kind'"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_setting_is_one_line_and_makes_no_run(text, message, tmp_path, data, dpformer):
    (tmp_path / "settings.toml").write_text(text)
    folder = tmp_path / "run"
    done = dpformer("fit", data, "--run", folder, "--preset", "dpformer", "--config", tmp_path / "settings.toml")
    assert done.code == 2, done
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1, done.err
    assert message in done.err
    assert not folder.exists()


# Stored recipes


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("options", [{}, {"seed": 3, "tuning": {"kind": "listed", "configurations": ["a", "b"]}}])
def test_a_recipe_is_read_as_it_was_written(preset, options):
    recipe = make_recipe(preset, **options)
    assert Recipe.model_validate(json.loads(json.dumps(recipe.settings(), allow_nan=False))) == recipe
    if preset in ("dpformer", "paper"):
        recipe = make_recipe(preset, epsilon=INF, **options)
        assert Recipe.model_validate(json.loads(json.dumps(recipe.settings(), allow_nan=False))) == recipe


def without(recipe: dict[str, Any], *stages: str) -> None:
    recipe["stages"] = [stage for stage in recipe["stages"] if stage["stage"] not in stages]


INCONSISTENT = {
    "a vocabulary without a histogram": (lambda r: without(r, "histogram"), "needs the stage histogram"),
    "no transitions for distil": (lambda r: without(r, "transitions"), "needs the stage transitions"),
    "a network of nothing": (lambda r: r.update(network=None), "a network goes with"),
    "more than the budget": (lambda r: r["stages"][0].update(share=0.9), "sum to 1.87"),
    "another order": (lambda r: r["stages"].reverse(), "in this order"),
    "no stage": (lambda r: r.update(stages=[]), "must be some of"),
    "without privacy": (lambda r: r.update(epsilon="inf"), "without privacy"),
    "a stage of strangers": (lambda r: r["stages"].append({"stage": "other"}), "other"),
    "an unknown name": (lambda r: r.update(heads=2), "heads"),
    "a number out of bounds": (lambda r: r["network"].update(d=0), "network.d"),
    "a recurrent network with recency": (lambda r: r["network"].update(model="gru"), "recency is for"),
    "tuning that lists nothing": (lambda r: r.update(tuning={"kind": "listed"}), "goes with configurations"),
}


@pytest.mark.parametrize("kind", INCONSISTENT)
def test_a_stored_recipe_that_is_inconsistent_is_refused(kind, tmp_path, data):
    """The checks run whenever a recipe is read, not only where it is made."""
    folder = tmp_path / "run"
    start(folder, data, small_recipe("distilled")).close()
    config = json.loads((folder / "config.json").read_text())
    assert read_recipe(folder) == small_recipe("distilled")
    change, said = INCONSISTENT[kind]
    change(config["recipe"])
    (folder / "config.json").write_text(json.dumps(config))
    for function in (read_recipe, resume):
        with pytest.raises(DPFormerError, match=r"config\.json: is damaged or of another version") as error:
            function(folder)
        assert said in str(error.value)
        assert "\n" not in str(error.value)


# What to type


STEPS: dict[str, Any] = {"stage": "dpsgd", "epochs": 2}
CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("distilled", {"d": 16, "distil.steps": 7, "transitions.weight": 0.0}),
    ("distilled", {"histogram.share": 0.5, "transitions.share": 0.5, "vocabulary": None}),
    ("dpformer", {"model": "lstm", "recency": None, "seed": 4}),
    ("dpformer", {"epsilon": INF, "batch_size": 100, "max_norm": 0.5}),
    ("dpformer", {"tuning": "none", "hold_out": "nothing", "population": 900}),
    ("default", {"transitions.share": 0.9, "tuning": {"kind": "listed", "configurations": ["a", "b c"]}}),
    ("paper", {"batch_size": None, "reattention": "off", "tied": False}),
    ("transitions", {"delta": 1e-9, "weight": 0.25}),
    ("popularity", {"epsilon": 0.5}),
    ("dpformer", {"stages": [STEPS], "vocabulary": None}),
    ("dpformer", {"stages": [{"stage": "histogram", "share": 0.1}, STEPS], "d": 9}),
    (
        "default",
        {"stages": [{"stage": "histogram"}, {"stage": "transitions", "share": 0.2}, {"stage": "distil"}, STEPS]},
    ),
]


def typed(recipe: Recipe) -> Recipe:
    """The recipe that comes of typing its command, through JSON as config.json has it."""
    way = json.loads(json.dumps(command(recipe), allow_nan=False))
    assert set(way) == {"preset", "epsilon", "set"}
    return make_recipe(way["preset"], epsilon=way["epsilon"], **way["set"])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_command_of_a_preset_is_its_name(preset):
    recipe = make_recipe(preset)
    assert command(recipe) == {"preset": preset, "epsilon": 8.0, "set": {}}
    assert typed(recipe) == recipe


@pytest.mark.parametrize(("preset", "options"), CHANGED)
def test_the_command_of_a_recipe_makes_the_same_recipe(preset, options):
    recipe = make_recipe(preset, **options)
    assert recipe != make_recipe(preset)
    assert typed(recipe) == recipe


def test_the_command_names_what_differs_only():
    way = command(make_recipe("dpformer", epochs=3, d=8, epsilon=2))
    assert way == {"preset": "dpformer", "epsilon": 2.0, "set": {"network.d": 8, "dpsgd.epochs": 3.0}}


def test_the_command_can_be_typed(tmp_path, data, dpformer):
    """Each setting as `--set name=value`, as a report prints it."""
    stages = [{"stage": "histogram"}, {"stage": "transitions", "share": 0.2}, {"stage": "distil", "steps": 2}, STEPS]
    recipe = small_recipe("default", stages=stages, d=8, vocabulary=None, tuning="none")
    way = command(recipe)
    settings = [part for k, v in way["set"].items() for part in ("--set", f"{k}={json.dumps(v)}")]
    fit = ["fit", data, "--run", tmp_path / "run", "--preset", way["preset"], "--epsilon", way["epsilon"]]
    assert dpformer(*fit, *settings, "--quiet").code == 0
    assert read_recipe(tmp_path / "run") == recipe


# Documentation


GROUPS = {"": Recipe, "network": NetworkSettings, **STAGES}


def settings_of(group: str) -> dict[str, Any]:
    """The fields of a group that a person may set, by their whole names."""
    fields = {name: field for name, field in GROUPS[group].model_fields.items() if field.description}
    return {f"{group}.{name}" if group else name: field for name, field in fields.items()}


def table_of(group: str) -> list[str]:
    rows = [
        f"| `{name}` | {field.default.kind if isinstance(field.default, Tuning) else field.default} | {field.description} |"
        for name, field in settings_of(group).items()
    ]
    return ["| setting | default | meaning |", "|---|---|---|", *rows]


def test_every_field_is_a_setting_with_a_meaning():
    for group, kind in GROUPS.items():
        others = {"stage"} if group in STAGES else {"network", "stages"} if not group else set()
        assert {name.rpartition(".")[2] for name in settings_of(group)} == set(kind.model_fields) - others


def test_there_are_fewer_than_25_settings():
    assert sum(len(settings_of(group)) for group in GROUPS) < 25


@pytest.mark.parametrize("group", GROUPS)
def test_the_documentation_has_every_setting(group):
    assert "\n\n" + "\n".join(table_of(group)) + "\n\n" in TRAINING.read_text()


def test_the_documentation_has_every_preset_and_no_other_setting():
    page = TRAINING.read_text()
    for preset, values in (PRESETS | NOT_PRIVATE).items():
        assert f"| `{preset}` | {', '.join(stage['stage'] for stage in values['stages'])} |" in page
    rows = page[page.index("## Settings") : page.index("## What a step does")].splitlines()
    documented = [line.split("`")[1] for line in rows if line.startswith("| `")]
    assert documented == [name for group in GROUPS for name in settings_of(group)]


@pytest.mark.parametrize("preset", ["dpformer", "paper", "default"])
def test_another_network_leaves_out_what_only_a_transformer_has(preset):
    recipe = make_recipe(preset, model="gru")
    assert recipe.network.model == "gru"
    with pytest.raises(DPFormerError, match="blocks is for the transformer, not for 'gru'; leave it out"):
        make_recipe(preset, model="gru", blocks=3)


def test_a_network_that_is_registered_is_a_setting(monkeypatch):
    """To add a network takes its module and one import."""

    class Spec(NetworkSpec):
        kind: str = "mean"

    class Mean(Network):
        pass

    monkeypatch.setattr(recommender, "_MODELS", dict(recommender._MODELS))
    with pytest.raises(DPFormerError, match="must be one of gru, lstm, transformer, not 'mean'"):
        make_recipe("dpformer", model="mean")
    recommender.register("mean", Spec)(Mean)
    network = make_recipe("dpformer", model="mean", d=8).network
    assert network.spec(9) == Spec(items=9, d=8, max_length=200, vocabulary=1500)
    assert isinstance(build(network.spec(9)), Mean)


def test_a_change_of_a_group_that_does_not_exist_is_an_error():
    recipe = make_recipe("dpformer")
    assert recipe.changed({"distil.steps": 2}) == recipe  # a stage that the recipe lacks
    with pytest.raises(KeyError, match="dpgsd"):
        recipe.changed({"dpgsd.epochs": 2})
