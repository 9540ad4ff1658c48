"""The model card: what the model is, what it promises, and how it was made."""

from __future__ import annotations

import json
import shlex
from typing import Any

from dpformer.models import Spec
from dpformer.privacy import PrivacyStatement

_RANKED = (
    "all items are ranked for all users, items of the history masked (and unmasked beside it); ties count as missed."
)
_EVALUATED = {
    "validation": "`dpformer evaluate` asks for each user's last item (test) or second to last (validation): "
    + _RANKED,
    "test": "`dpformer evaluate` asks for each user's last item: " + _RANKED,
    "nothing": "Nothing was held out, so `dpformer evaluate` refuses this model on the same data.",
}


def model_card(spec: Spec, statement: PrivacyStatement, config: dict[str, Any]) -> str:
    """Markdown for people who get the model without its history. config: the content of config.json."""
    hold_out, date = str(config.get("recipe", {}).get("hold_out")), _table(config, "log").get("date")
    asked = _EVALUATED.get(hold_out, "")
    if date is not None and hold_out != "nothing":
        asked = f"`dpformer evaluate` asks for each user's first item from {date} (UTC) on: {_RANKED}"
    made = "\n".join(commands(config, "RUN"))
    return f"""{_front_matter(statement)}# A next-item recommender

{spec.name} over {spec.items:,} items, made with dpformer. It reads a history of item ids and ranks all items as the next one.

```python
from dpformer import load_model

load_model("this folder").recommend([["item", "another item"]], k=10)
```

## Privacy

{statement.text()}

## How it was made

```sh
{made}
```

Trained on {statement.data.trained_on}. {asked}

## Not private

`metrics.json` and `events.jsonl`, where they are here, were computed on people's data without noise: keep them to yourself, or
delete them before the folder is published.
"""


def _front_matter(statement: PrivacyStatement) -> str:
    """What model hubs read: YAML, of which JSON values are a part."""
    tags = ["recommender", "sequential-recommendation"]
    tags += ["differential-privacy"] if statement.private and not statement.insecure else ["not-private"]
    privacy: dict[str, Any] = {"epsilon": statement.epsilon, "delta": statement.delta, "unit": statement.unit}
    privacy |= {} if statement.alone is None else {"run_alone": statement.alone.model_dump()}
    fields = {"library_name": "dpformer", "tags": tags, "differential_privacy": privacy}
    return "---\n" + "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items()) + "---\n\n"


def evaluated(config: dict[str, Any]) -> bool:
    """Whether training held out events, on which the model can be evaluated."""
    recipe = config.get("recipe")
    return isinstance(recipe, dict) and recipe.get("hold_out") != "nothing"


def commands(config: dict[str, Any], run: str) -> list[str]:
    """The commands that make such a run, in the folder `run`. The noise will differ, and so will the figures, a little."""
    typed, log, run = _table(config, "command"), _table(config, "log"), shlex.quote(run)
    options = [f"--{name} {_word(typed[name])}" for name in ("preset", "model", "epsilon") if name in typed]
    options += [f"--set {shlex.quote(f'{key}={_text(value)}')}" for key, value in _table(typed, "set").items()]
    made = [
        str(log.get("command", "dpformer prepare LOG -o DATA")),
        " ".join(["dpformer fit DATA --run", run, *options]),
    ]
    return [*made, f"dpformer evaluate {run}"] if evaluated(config) else made


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    """config.json is not trusted."""
    table = values.get(name)
    return table if isinstance(table, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _word(value: object) -> str:
    """A value as one quoted word of a shell."""
    return shlex.quote(f"{value:g}" if isinstance(value, float) else _text(value))
