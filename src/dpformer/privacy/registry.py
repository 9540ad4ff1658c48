"""The statement as an entry of a public registry of differential-privacy deployments.

The fields are those that such a registry asks for (Nanayakkara, Ghazi, Vadhan: arXiv 2509.13509, and the registry that was
opened from it), in a schema of our own, committed as docs/registry.schema.json. What no statement can know, the owner says:
`to_fill_in` lists what is still missing.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dpformer.privacy.parts import EpsilonValue, Part
from dpformer.privacy.statement import PrivacyStatement


class Deployment(Part):
    """What was released, by whom and why. None: to be filled in by the owner."""

    name: str
    organisation: str | None = None
    intended_use: str | None = None
    data_product: str = "machine learning model: ranks items as the next one after a history"
    release: Literal["static"] = "static"


class Guarantee(Part):
    """The definition that holds: its parameters, its unit, its domain, and what it does not protect."""

    definition: str = "approximate differential privacy, central model"
    epsilon: EpsilonValue
    delta: float
    unit: str
    neighbours: str
    domain: str = "finite sequences of items of the catalogue, one per person"
    unprotected: tuple[str, ...] = Field(description="Assumed public, or outside of the guarantee.")
    justification: str | None = Field(None, description="Why these parameters.")


class Actors(Part):
    """Who is trusted with what."""

    curator: str = "holds people's data and draws the noise; trusted"
    readers: str = "see the released folder and all of its uses; not trusted, with any knowledge beside it"


class Mechanism(Part):
    """One kind of answer that was charged."""

    name: str
    noise_multiplier: float
    sampling_rate: float = 1.0
    times: int = 1


class RegistryEntry(Part):
    """An entry of the registry."""

    format: Literal[1] = 1
    deployment: Deployment
    guarantee: Guarantee
    actors: Actors = Actors()
    mechanisms: tuple[Mechanism, ...]
    composition: str
    tuning: str
    floating_point: str
    assumptions: tuple[str, ...]
    insecure: tuple[str, ...]
    implementation: dict[str, str]
    to_fill_in: tuple[str, ...] = ()


def registry_entry(statement: PrivacyStatement, name: str, **owner: str | None) -> RegistryEntry:
    """The entry of a run. owner: organisation, intended_use, justification, as far as they are given."""
    steps = statement.steps
    answers = [Mechanism(name=one.name, noise_multiplier=one.noise_multiplier) for one in statement.releases]
    if steps is not None:
        answers.append(
            Mechanism(
                name="gradients",
                noise_multiplier=steps.noise_multiplier,
                sampling_rate=steps.sampling_rate,
                times=steps.charged,
            )
        )
    tuning = statement.tuning
    return RegistryEntry(
        deployment=Deployment(
            name=name, organisation=owner.get("organisation"), intended_use=owner.get("intended_use")
        ),
        guarantee=Guarantee(
            epsilon=statement.epsilon,
            delta=statement.delta,
            unit=statement.unit,
            neighbours=statement.neighbours,
            unprotected=(*statement.assumed_public, *statement.data.outside_guarantee),
            justification=owner.get("justification"),
        ),
        mechanisms=tuple(answers),
        composition=f"{statement.accountant.used} ({statement.accountant.library} {statement.accountant.version}), adaptive",
        tuning=f"{tuning.kind}: {len(tuning.configurations)} configurations" if tuning.configurations else tuning.kind,
        floating_point=f"{statement.noise.generator}; {statement.noise.grid}" if statement.private else "no noise",
        assumptions=statement.assumptions,
        insecure=statement.insecure,
        implementation=statement.versions,
        to_fill_in=tuple(key for key in ("organisation", "intended_use", "justification") if not owner.get(key)),
    )


def registry_schema() -> dict[str, Any]:
    """The JSON schema of an entry."""
    return RegistryEntry.model_json_schema(mode="serialization")
