"""The privacy statement of a run: what its ledger says was charged, and what was decided by its data."""

from __future__ import annotations

from dpformer.data import Dataset
from dpformer.data.split import trained_on
from dpformer.fit.recipe import Recipe
from dpformer.privacy import PrivacyPlan
from dpformer.privacy.build import Circumstances
from dpformer.privacy.statement import DataPart
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


def circumstances(plan: PrivacyPlan, recipe: Recipe, dataset: Dataset, prior: bool) -> Circumstances:
    """What the statement of a run says beside plan and ledger. prior: see `Circumstances`."""
    data = data_part(dataset, plan.private, trained_on(recipe.hold_out, dataset.log.get("date")))
    public = ["the catalogue of items"] if data.catalogue == "log" else []
    if recipe.network is not None:
        public.append(f"the greatest length of a history, {recipe.network.max_length}")
    return Circumstances(data=data, assumed_public=tuple(public), assumptions=assumptions(plan), prior=prior)
