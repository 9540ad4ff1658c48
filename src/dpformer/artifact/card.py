"""The model card: what the model is, what it promises, and how it was made."""

from __future__ import annotations

from typing import Any

from dpformer.models import Spec
from dpformer.privacy import PrivacyStatement


def model_card(spec: Spec, statement: PrivacyStatement, config: dict[str, Any]) -> str:
    """Markdown for people who get the model without its history. config: the content of config.json."""
    command = config.get("command", {})
    settings = "\n".join(f"- {key}: {value}" for key, value in command.get("set", {}).items()) or "- none"
    return f"""# A next-item recommender

{spec.name} over {spec.items:,} items, made with dpformer. It reads a history of item ids and ranks all items as the next one.

```python
from dpformer import load_model

load_model("this folder").recommend([["item", "another item"]], k=10)
```

## Privacy

{statement.text()}

## Settings that differ from the preset {command.get("preset", "default")}

{settings}

## Protocol

Trained on {statement.data.trained_on}. `dpformer evaluate` holds out the last one (test) or the second to last
(validation), if training did not see it, ranks all items for all users, without sampling, items of the history masked (and
unmasked beside it), and counts ties against the model.

## Not private

`metrics.json` and `events.jsonl`, where they are here, were computed on people's data without noise: keep them to yourself, or
delete them before the folder is published.
"""
