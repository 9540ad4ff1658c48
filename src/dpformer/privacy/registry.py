"""The privacy statement as an entry of a public registry of deployments (`dpformer privacy --registry`).

The fields are those that such a registry asks for (Nanayakkara, Ghazi, Vadhan: arXiv 2509.13509, and the registry that was
opened from it), in a schema of our own: docs/registry.schema.json. What no statement can know, the owner says: `to_fill_in`
lists what is still missing.
"""

from typing import Any

from dpformer.privacy.plan import GRADIENTS
from dpformer.privacy.statement import PrivacyStatement


def registry_entry(statement: PrivacyStatement, name: str, **owner: str | None) -> dict[str, Any]:
    """The entry of a run, for JSON. owner: organisation, intended_use, justification, as far as they are given."""
    said = statement.model_dump(mode="json")
    accountant, noise, tuning, steps = said["accountant"], said["noise"], said["tuning"], said["steps"]
    mechanisms = [_mechanism(one["name"], one["noise_multiplier"], 1.0, 1) for one in said["releases"]]
    if steps is not None:
        mechanisms.append(_mechanism(GRADIENTS, steps["noise_multiplier"], steps["sampling_rate"], steps["charged"]))
    runs = said["account"]["runs"] if said["alone"] else 1
    earlier = f"; with the {runs - 1} earlier runs of the account, whose answers the model uses" if runs > 1 else ""
    tried = len(tuning["configurations"])
    return {
        "format": 1,
        "deployment": {
            "name": name,
            "organisation": owner.get("organisation"),
            "intended_use": owner.get("intended_use"),
            "data_product": "machine learning model: ranks items as the next one after a history",
            "release": "static",
        },
        "guarantee": {
            "definition": "approximate differential privacy, central model",
            **{field: said[field] for field in ("epsilon", "delta", "unit", "neighbours")},
            "domain": "finite sequences of items of the catalogue, one per person",
            "unprotected": [*said["assumed_public"], *said["data"]["outside_guarantee"]],
            "justification": owner.get("justification"),
        },
        "actors": {
            "curator": "holds people's data and draws the noise; trusted",
            "readers": "see the released folder and all of its uses; not trusted, with any knowledge beside it",
        },
        "mechanisms": mechanisms,
        "composition": f"{accountant['used']} ({accountant['library']} {accountant['version']}), adaptive{earlier}",
        "tuning": f"{tuning['kind']}: {tried} configurations" if tried else tuning["kind"],
        "floating_point": f"{noise['generator']}; {noise['grid']}" if statement.private else "no noise",
        "assumptions": said["assumptions"],
        "insecure": said["insecure"],
        "implementation": said["versions"],
        "to_fill_in": [key for key in ("organisation", "intended_use", "justification") if not owner.get(key)],
    }


def _mechanism(name: str, noise_multiplier: float, rate: float, times: int) -> dict[str, Any]:
    return {"name": name, "noise_multiplier": noise_multiplier, "sampling_rate": rate, "times": times}
