"""Requests, their limits, and answers. Limits are part of the schema, so that OpenAPI shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from dpformer.privacy import PrivacyStatement

# Of ids that are numbers: all of 64 bits. A power of ten, since those who write JSON may round larger powers of two.
MOST = 10**19
# Characters of a condition.
WHERE = 500


@dataclass(frozen=True)
class Limits:
    """Of one request: bytes of its body, histories, items of a history, k, listed (excluded items, values of a filter), seconds.

    waiting: histories that may wait for the model; beyond that the server says that it is busy.
    """

    body: int = 1_000_000
    histories: int = 64
    history: int = 1000
    k: int = 100
    listed: int = 1000
    timeout: float = 5.0
    waiting: int = 1024


def _text(value: Any) -> Any:
    """Ids may be numbers; `true` is none."""
    if isinstance(value, bool):
        raise ValueError("an item is a text or a whole number")
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        if abs(value) > MOST:
            raise ValueError(f"an item that is a number is between -{MOST} and {MOST}; give a longer one as a text")
        return str(int(value))
    return value


Item = Annotated[
    str,
    BeforeValidator(_text),
    Field(
        max_length=1000,
        json_schema_extra={"type": ["string", "integer"], "minimum": -MOST, "maximum": MOST},
        description="An item id or a title of the catalogue.",
    ),
]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RecommendRequest(_Request):
    """What `POST /recommend` takes. `request_within` adds the limits of a server."""

    histories: list[list[Item]]
    k: int
    only: list[Item] | None
    exclude: list[Item]
    where: str | None
    seen: bool


def where_text(columns: list[str]) -> str:
    """The description of a condition on the catalogue."""
    return f"An SQL condition on the columns of the catalogue ({', '.join(columns)}), such as: item_id <> 'a'"


def request_within(limits: Limits, columns: list[str]) -> type[RecommendRequest]:
    """The request, with the limits of this server and the columns that it can filter on."""
    history = Annotated[list[Item], Field(max_length=limits.history)]
    fields: dict[str, Any] = {
        "histories": (
            list[history],
            Field(min_length=1, max_length=limits.histories, description="Items of each person, oldest first."),
        ),
        "k": (int, Field(10, ge=1, le=limits.k, description="How many items for each.")),
        "only": (list[Item] | None, Field(None, max_length=limits.listed, description="Recommend these items alone.")),
        "exclude": (list[Item], Field([], max_length=limits.listed, description="Items not to be recommended.")),
        "where": (str | None, Field(None, max_length=WHERE, description=where_text(columns))),
        "seen": (bool, Field(False, strict=True, description="Recommend items of the history too.")),
    }
    example: Any = {"histories": [["book-000", "book-001"]], "k": 5, "exclude": ["book-002"]}
    made = create_model("RecommendRequest", __base__=RecommendRequest, **fields)
    made.model_config["json_schema_extra"] = {"examples": [example]}
    made.model_rebuild(force=True)
    return made


class CatalogueItem(BaseModel):
    """An item as the catalogue has it."""

    item_id: str
    title: str | None


class RankedItem(CatalogueItem):
    """A recommendation. Scores compare items within one list only."""

    rank: int
    score: float


class Ranking(BaseModel):
    """The answer to one history: best first, and what was not understood."""

    items: list[RankedItem]
    missing: int = Field(description="How many fewer than k they are: no more items pass the filters.")
    unknown: list[str] = Field(description="Items of the history that are not in the catalogue; they were skipped.")
    ranked_by: str = Field(description="'history', or how a history without an item of the catalogue was ranked.")


class RecommendAnswer(BaseModel):
    """One ranking per history, in their order."""

    rankings: list[Ranking]
    unknown: list[str] = Field(description="Items of `only` and `exclude` that are not in the catalogue.")


class SimilarAnswer(BaseModel):
    """The items most like an item, best first, and how many fewer than k they are."""

    items: list[RankedItem]
    missing: int


class ItemsAnswer(BaseModel):
    """Items that match, best first; `more` if there are others."""

    items: list[CatalogueItem]
    more: bool


class Health(BaseModel):
    """That the server answers, and what it serves."""

    status: str
    model: str
    items: int
    columns: list[str] = Field(description="Columns of the catalogue for `where`.")
    max_k: int
    max_history: int


class Ready(BaseModel):
    """Whether the model can take a request now."""

    ready: bool


class Version(BaseModel):
    """Which model is served. sha256: of its weights."""

    dpformer: str
    run: str
    model: str
    sha256: str
    items: int


class PrivacyAnswer(BaseModel):
    """The privacy statement of the model, in words and as data; and what serving adds to it."""

    text: str
    served: str
    statement: PrivacyStatement


class Problem(BaseModel):
    """What is wrong, in one line."""

    detail: str
