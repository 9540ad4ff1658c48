"""The model card: what the model is, what it promises, and how it was made."""

from __future__ import annotations

from dpformer.fit.recipe import Recipe
from dpformer.privacy import PrivacyStatement


def model_card(recipe: Recipe, statement: PrivacyStatement, items: int) -> str:
    """Markdown for people who get the model without its history."""
    changed = {k: v for k, v in recipe.model_dump().items() if v != Recipe.model_fields[k].default}
    settings = "\n".join(f"- {key}: {value}" for key, value in changed.items()) or "- all defaults"
    return f"""# A next-item recommender

{recipe.model} over {items:,} items, made with dpformer. It reads a history of item ids and ranks all items as the next one.

```python
from dpformer import load_model

load_model("this folder").recommend([["item", "another item"]], k=10)
```

## Privacy

{statement.text()}

## Settings that differ from the defaults

{settings}

## Protocol

Trained on {statement.data.trained_on}. `dpformer evaluate` holds out the last one (test) or the second to last
(validation), if training did not see it, ranks all items for all users, without sampling, items of the history masked (and
unmasked beside it), and counts ties against the model.

## Not private

`metrics.json` and `events.jsonl`, where they are here, were computed on people's data without noise: keep them to yourself, or
delete them before the folder is published.
"""
