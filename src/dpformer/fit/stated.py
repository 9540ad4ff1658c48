"""The privacy statement of a run: what its ledger says was charged, and what was decided by its data."""

from __future__ import annotations

from dpformer.data import Dataset, Sequences
from dpformer.data.split import trained_on
from dpformer.fit.recipe import Recipe
from dpformer.privacy import Curator, PrivacyPlan, PrivacyStatement
from dpformer.privacy.account import Spending
from dpformer.privacy.build import Circumstances, build_statement
from dpformer.privacy.statement import DataPart, TuningPart
from dpformer.training.groups import Groups, slack_in_words

NOTHING_SELECTED = (
    "no item was selected: without privacy (epsilon inf) all items of the log are in the catalogue, in spite of --catalogue "
    "private; do not publish it"
)


def data_part(dataset: Dataset, private: bool, trained_on: str = "all events") -> DataPart:
    """What was decided by the data. private: whether the run is; only then items of a private catalogue are selected."""
    outside, mode = tuple(dataset.outside_guarantee), dataset.catalogue_mode
    if mode == "private" and not private:
        outside, mode = (*outside, NOTHING_SELECTED), "log"
    return DataPart.model_validate({"catalogue": mode, "outside_guarantee": outside, "trained_on": trained_on})


def assumptions(plan: PrivacyPlan) -> tuple[str, ...]:
    """What the statement assumes."""
    return (slack_in_words(Groups.of(plan.users, plan.rate, plan.declared)),) if plan.steps else ()


def state_privacy(
    curator: Curator[Sequences],
    recipe: Recipe,
    dataset: Dataset,
    spending: Spending | None = None,
    prior: bool = False,
) -> PrivacyStatement:
    """The privacy statement of a run, from what its ledger says was charged. prior: see `Circumstances`."""
    plan = curator.plan
    data = data_part(dataset, plan.private, trained_on(recipe.hold_out, dataset.log.get("date")))
    public = ["the catalogue of items"] if data.catalogue == "log" else []
    if recipe.network is not None:
        public.append(f"the greatest length of a history, {recipe.network.max_length}")
    about = Circumstances(
        data=data,
        seeded=curator.keys.seeded,
        assumed_public=tuple(public),
        assumptions=assumptions(plan),
        account=spending,
        prior=prior,
    )
    account = None if curator.ledger is None else curator.ledger.account()
    return build_statement(plan, account, about, TuningPart(**recipe.tuning.model_dump()))
