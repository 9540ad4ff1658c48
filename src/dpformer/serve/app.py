"""The routes: recommendations, search, the privacy statement, health, metrics, and the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from dpformer import __version__
from dpformer.errors import DataError, DPFormerError
from dpformer.serve import schema
from dpformer.serve.batcher import Batcher, BusyError
from dpformer.serve.guard import Guard
from dpformer.serve.metrics import CONTENT_TYPE, Metrics
from dpformer.serve.ranker import ItemSearch, Ranker
from dpformer.serve.ranker import Query as Ask
from dpformer.serve.schema import Limits

SERVED = (
    "The guarantee is for the people whose data the model was trained on. The history handed in here is not covered by it: it is "
    "used for this answer, not learned from, and neither stored nor logged by this server; but who sees the request or the "
    "recommendations can infer something about it."
)
_PAGE = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/app.js": ("app.js", "text/javascript"),
    "/docs": ("docs.html", "text/html"),
    "/docs.js": ("docs.js", "text/javascript"),
}
_DESCRIPTION = "Ranks items as the next one after a history. " + SERVED
_BUSY: dict[int | str, dict[str, Any]] = {
    400: {"model": schema.Problem, "description": "The body is not text."},
    408: {"model": schema.Problem, "description": "The body came too slowly."},
    413: {"model": schema.Problem, "description": "The body is too long."},
    503: {"model": schema.Problem, "description": "Busy: try again soon."},
}  # fmt: skip


def create_app(
    ranker: Ranker, limits: Limits | None = None, token: str | None = None, metrics: Metrics | None = None
) -> FastAPI:
    """The application, an ASGI callable. token: what clients must send, if anything; metrics: shared with earlier models."""
    limits, metrics = limits or Limits(), metrics or Metrics()
    artifact = ranker.artifact
    batcher = Batcher(ranker.answer, waiting=limits.waiting, on_batch=metrics.batch)
    metrics.serve(artifact, lambda: batcher.waiting)
    search = ItemSearch(ranker.ids, ranker.titles)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.stop()

    # FastAPI's own documentation pages load scripts from the network; /docs is a page of ours.
    app = FastAPI(
        title="dpformer", version=__version__, description=_DESCRIPTION, lifespan=lifespan, docs_url=None, redoc_url=None
    )  # fmt: skip
    app.add_middleware(Guard, limits=limits, answered=metrics.answered, token=token)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # Without what was sent: it may be long, and it is the client's already.
        problems = [{key: problem[key] for key in ("type", "loc", "msg")} for problem in error.errors()[:20]]
        return JSONResponse({"detail": problems}, 422)

    def item(number: int) -> dict[str, Any]:
        return {"item_id": ranker.ids[number - 1], "title": ranker.titles[number - 1]}

    async def recommend(asked: schema.RecommendRequest, request: Request) -> JSONResponse:
        """The best k items for each history. Items that are not in the catalogue are skipped and named."""
        request.scope["histories"] = len(asked.histories)
        try:
            # Without filters it is made already; a condition on many items takes some milliseconds.
            plain = asked.only is None and asked.where is None
            best, unknown_only = (
                ranker.best(None, None) if plain else await asyncio.to_thread(ranker.best, asked.only, asked.where)
            )
        except DPFormerError as error:
            return _refused("where", error)
        exclude, unknown_exclude = artifact.encode(asked.exclude)
        encoded = [artifact.encode(history) for history in asked.histories]
        queries = [Ask(history, asked.k, exclude + ([] if asked.seen else history), best) for history, _ in encoded]
        try:
            answers = await asyncio.wait_for(batcher.ask(queries), limits.timeout)
        except (TimeoutError, BusyError):
            return JSONResponse({"detail": "the server is busy: try again soon"}, 503, {"retry-after": "1"})
        rankings = [
            {
                "items": [item(n) | {"rank": rank, "score": score} for rank, (n, score) in enumerate(ranked, 1)],
                "missing": asked.k - len(ranked),
                "unknown": unknown,
                "ranked_by": "history" if history else artifact.cold_start,
            }
            for ranked, (history, unknown) in zip(answers, encoded, strict=True)
        ]
        return JSONResponse({"rankings": rankings, "unknown": unknown_only + unknown_exclude})

    @app.get("/items", response_model=schema.ItemsAnswer)
    def items(
        q: Annotated[str, Query(max_length=200, description="Words of a title or an id; empty for all.")] = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> JSONResponse:
        """Items of the catalogue by what people type."""
        places, more = search.find(q, limit)
        return JSONResponse({"items": [item(place + 1) for place in places], "more": more})

    def similar(
        item_id: str,
        k: int = 10,
        where: str | None = None,
        only: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
    ) -> JSONResponse:
        """The items most like an item, by the released model alone."""
        try:
            rows = artifact.similar(item_id, k, only, exclude, where).to_dicts()
        except DPFormerError as error:
            return _refused("where" if isinstance(error, DataError) else "item_id", error)
        items = [{**row, "item_id": str(row["item_id"]), "title": row.get("title")} for row in rows]
        return JSONResponse({"items": items, "missing": k - len(items)})

    # The limits of this server are in the types, so these routes are added by hand.
    recommend.__annotations__ = {
        "asked": schema.request_within(limits, ranker.columns),
        "request": Request,
        "return": JSONResponse,
    }
    app.post("/recommend", response_model=schema.RecommendAnswer, responses=_BUSY)(recommend)
    similar.__annotations__ = {
        "item_id": Annotated[str, Query(max_length=1000, description="An item id or a title.")],
        "k": Annotated[int, Query(ge=1, le=limits.k)],
        "where": Annotated[str | None, Query(max_length=schema.WHERE, description=schema.where_text(ranker.columns))],
        "only": Annotated[list[str] | None, Query(max_length=limits.listed, description="Show these items alone.")],
        "exclude": Annotated[list[str], Query(max_length=limits.listed, description="Items that are not to be shown.")],
        "return": JSONResponse,
    }
    app.get("/similar", response_model=schema.SimilarAnswer, responses=_BUSY)(similar)

    privacy_text = JSONResponse(
        {"text": artifact.statement.text(), "served": SERVED, "statement": artifact.statement.model_dump(mode="json")}
    ).body  # fmt: skip

    @app.get("/privacy", response_model=schema.PrivacyAnswer)
    async def privacy() -> Response:
        """The privacy statement of the model."""
        return Response(privacy_text, media_type="application/json")

    @app.get("/healthz", response_model=schema.Health)
    async def healthz() -> dict[str, Any]:
        """200 as long as the server answers."""
        return {
            "status": "ok",
            "model": artifact.model.spec.name,
            "items": len(ranker.ids),
            "columns": ranker.columns,
            "max_k": limits.k,
            "max_history": limits.history,
        }

    @app.get("/readyz", response_model=schema.Ready, responses=_BUSY)
    async def readyz() -> JSONResponse:
        """200 when the model can take a request; 503 when too many wait."""
        ready = batcher.waiting < limits.waiting
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    @app.get("/version", response_model=schema.Version)
    async def version() -> dict[str, Any]:
        """Which model is served: the name of its run folder and the hash of its weights."""
        return {
            "dpformer": __version__,
            "run": ranker.name,
            "model": artifact.model.spec.name,
            "sha256": ranker.sha256,
            "items": len(ranker.ids),
        }

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Counts and times in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    for path, (name, kind) in _PAGE.items():
        content = (files("dpformer.serve") / "page" / name).read_bytes()
        app.get(path, include_in_schema=False)(_file(content, kind))
    return app


def _refused(field: str, error: DPFormerError) -> JSONResponse:
    return JSONResponse({"detail": [{"type": "refused", "loc": [field], "msg": str(error)}]}, 422)


def _file(content: bytes, kind: str) -> Any:
    async def send() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8")

    return send
