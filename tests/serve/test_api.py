"""The API in this process: what it answers, what it refuses, what it counts and what it does not write down."""

import asyncio
import json
import logging
import shutil
import threading
from pathlib import Path

import polars as pl
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from dpformer import load_model
from dpformer.errors import DPFormerError
from dpformer.files import sha256
from dpformer.fit.run import start
from dpformer.privacy import parse_statement
from dpformer.serve.app import create_app
from dpformer.serve.batcher import Batcher, BusyError
from dpformer.serve.guard import JsonLines
from dpformer.serve.ranker import ItemSearch, Query, Ranker, load_for_serving
from dpformer.serve.schema import Limits
from tests.fit.conftest import ITEMS
from tests.recipes import small_recipe


@pytest.fixture(scope="module")
def recommender(run) -> Ranker:
    return load_for_serving(run)


@pytest.fixture
def client(recommender):
    with TestClient(create_app(recommender)) as made:
        yield made


def test_recommendations_are_those_of_the_model(client, run):
    histories = [["i03", "Heat"], [], ["i05", "no such", "i06"]]
    answer = client.post("/recommend", json={"histories": histories, "k": 4}).json()
    frame = load_model(run).recommend(histories, k=4)
    for place, ranking in enumerate(answer["rankings"]):
        rows = frame.filter(pl.col("history") == place)
        assert [item["item_id"] for item in ranking["items"]] == rows["item_id"].to_list()
        assert [item["title"] for item in ranking["items"]] == rows["title"].to_list()
        assert [item["score"] for item in ranking["items"]] == pytest.approx(rows["score"].to_list(), rel=1e-5)
        assert [item["rank"] for item in ranking["items"]] == [1, 2, 3, 4]
    assert [ranking["unknown"] for ranking in answer["rankings"]] == [[], [], ["no such"]]
    assert [ranking["ranked_by"] for ranking in answer["rankings"]] == ["history", "the released popularity", "history"]


def ids(answer) -> list[str]:
    return [item["item_id"] for item in answer.json()["rankings"][0]["items"]]


def test_exclude_filters_and_seen(client):
    def ask(**options):
        return client.post("/recommend", json={"histories": [["i03", "i04"]], "k": ITEMS, **options})

    plain = ids(ask())
    assert len(plain) == ITEMS - 2
    answer = ask(exclude=[plain[0], "Toy,Story", "zzz"])
    assert ids(answer) == [i for i in plain[1:] if i != "i01"]
    assert answer.json()["unknown"] == ["zzz"]
    assert answer.json()["rankings"][0]["missing"] == ITEMS - len(ids(answer))
    assert set(ids(ask(seen=True))) == {*plain, "i03", "i04"}
    allowed = ["i07", "i03", "i09", "nothing"]
    answer = ask(only=allowed)
    assert ids(answer) == [i for i in plain if i in allowed]
    assert answer.json()["unknown"] == ["nothing"]
    assert ids(ask(only=allowed, where="title = 'Title 9'")) == ["i09"]
    assert ids(ask(only=[])) == []
    assert (
        ids(ask(where="item_id in ('i07', 'i03') or title like '%9'", k=2))
        == [i for i in plain if i in ("i07", "i09", "i19")][:2]
    )
    for wrong, said in {
        "genre = 'drama'": "item_id, title",
        "title = (lower('a')": "cannot be read",
        "title = (select 1)": "refused",
        "max(item_id) > 'a'": "refused",
    }.items():
        refused = ask(where=wrong)
        assert refused.status_code == 422
        assert said in refused.json()["detail"][0]["msg"]


def test_filters_of_one_request_do_not_touch_another(recommender):
    first, second = (recommender.best([name], None)[0] for name in ("i07", "i09"))
    queries = [Query([1], 3, [], best) for best in (first, second, recommender.best(None, None)[0], first)]
    answers = recommender.answer(queries)
    assert [[number for number, _ in answer] for answer in (*answers[:2], answers[3])] == [[8], [10], [8]]
    assert len(answers[2]) == 3
    assert recommender.best(["i07"], None)[0] is first, "kept for the next request"


def test_similar_items(client, recommender):
    answer = client.get("/similar", params={"item_id": "Heat", "k": 3}).json()
    expected = recommender.artifact.similar("i02", 3)
    assert [row["item_id"] for row in answer["items"]] == expected["item_id"].to_list()
    assert answer["missing"] == 0
    few = client.get("/similar", params={"item_id": "i02", "where": "item_id in ('i02', 'i05')"}).json()
    assert ([row["item_id"] for row in few["items"]], few["missing"]) == (["i05"], 9)
    others = client.get("/similar", params={"item_id": "i02", "only": ["i03", "i05"], "exclude": ["i05"]}).json()
    assert [row["item_id"] for row in others["items"]] == ["i03"]
    refused = client.get("/similar", params={"item_id": "i02", "where": "item_id in (select 1)"})
    assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (422, ["where"])
    refused = client.get("/similar", params={"item_id": "no such"})
    assert refused.status_code == 422
    assert "not in the catalogue" in refused.json()["detail"][0]["msg"]


def test_columns_that_were_added_to_the_catalogue_can_be_filtered_on(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    items = pl.read_ndjson(copy / "items.jsonl")
    year = pl.Series("year", [1990 + n % 3 if n else None for n in range(ITEMS)])
    genres = pl.Series("genres", [["drama", "war"] if n % 2 else ["comedy"] for n in range(ITEMS)])
    items.with_columns(year, genres).write_ndjson(copy / "items.jsonl")
    with TestClient(create_app(load_for_serving(copy))) as client:
        where = "year in (1991, 1992) and array_contains(genres, 'war')"
        body = {"histories": [[]], "k": ITEMS, "where": where}
        wanted = {f"i{n:02d}" for n in range(1, ITEMS) if n % 3 and n % 2}
        assert set(ids(client.post("/recommend", json=body))) == {i for i in items["item_id"] if i in wanted}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "histories"),
        ({"histories": []}, "histories"),
        ({"histories": [["a"] * 1001]}, "histories"),
        ({"histories": [[]] * 65}, "histories"),
        ({"histories": [[True]]}, "histories"),
        ({"histories": [[1.5]]}, "histories"),
        ({"histories": [[]], "k": 0}, "k"),
        ({"histories": [[]], "k": 101}, "k"),
        ({"histories": [[]], "exclude": ["a"] * 1001}, "exclude"),
        ({"histories": [[]], "only": ["a"] * 1001}, "only"),
        ({"histories": [[]], "where": "x" * 501}, "where"),
        ({"histories": [[]], "kk": 3}, "kk"),
    ],
)
def test_what_is_beyond_the_limits_is_refused_and_not_quoted(client, body, where):
    answer = client.post("/recommend", json=body)
    assert answer.status_code == 422
    assert where in answer.json()["detail"][0]["loc"]
    assert set(answer.json()["detail"][0]) == {"type", "loc", "msg"}


def test_a_long_body_is_refused_with_and_without_a_declared_length(recommender):
    with TestClient(create_app(recommender, Limits(body=1000))) as client:
        long = json.dumps({"histories": [["x" * 2000]]}).encode()
        kind = {"content-type": "application/json"}
        assert client.post("/recommend", content=long, headers=kind).status_code == 413
        assert client.post("/recommend", content=iter([long[:900], long[900:]]), headers=kind).status_code == 413
        assert client.post("/recommend", json={"histories": [["i01"]]}).status_code == 200


def test_search(client):
    assert [i["item_id"] for i in client.get("/items", params={"q": "bad UGLY"}).json()["items"]] == ["i00"]
    everything = client.get("/items", params={"limit": 5}).json()
    assert len(everything["items"]) == 5
    assert everything["more"]
    assert client.get("/items", params={"q": "no such thing"}).json() == {"items": [], "more": False}
    assert client.get("/items", params={"limit": 101}).status_code == 422


@pytest.mark.parametrize("number", [10**19 + 1, -(10**19) - 1, 1e25])
def test_a_number_that_no_log_can_hold_is_refused(client, number):
    for body in ({"histories": [[number]]}, {"histories": [["i01"]], "exclude": [number]}):
        refused = client.post("/recommend", json=body)
        assert refused.status_code == 422
        assert "as a text" in refused.text
        body = json.loads(json.dumps(body).replace(json.dumps(number), "7"))
        assert client.post("/recommend", json=body).status_code == 200
    assert client.post("/recommend", json={"histories": [[2**63 - 1, -(2**63), 1e18]]}).status_code == 200


def test_search_puts_the_likeliest_first_and_forgives_accents():
    search = ItemSearch(["a", "b", "c", "d", "e"], ["The Été", "Un été", "Summer, ete", "Ete", None])
    assert search.find("ETE", 10) == ([3, 0, 1, 2], False)
    assert search.find("e", 10)[0][0] == 4
    assert search.find("", 2) == ([0, 1], True)


def test_privacy_health_and_openapi(client, run):
    privacy = client.get("/privacy").json()
    assert parse_statement(json.dumps(privacy["statement"])) == parse_statement((run / "privacy.json").read_bytes())
    assert "not covered" in privacy["served"]
    assert privacy["text"].startswith("(")
    assert client.get("/healthz").json()["items"] == ITEMS
    schema = client.get("/openapi.json").json()
    assert schema["components"]["schemas"]["RecommendRequest"]["properties"]["k"]["maximum"] == 100


def test_metrics_are_prometheus_text_and_name_only_routes(client):
    client.post("/recommend", json={"histories": [["i01"], ["i02"]]})
    client.get("/secret-path")
    text = client.get("/metrics").text
    found = {
        s.name + str(sorted(s.labels.items())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    count = "dpformer_requests_total[('method', 'POST'), ('path', '/recommend'), ('status', '200')]"
    assert found[count] == 1
    assert found["dpformer_batch_histories_sum[]"] == 2
    assert "secret-path" not in text


def test_no_log_line_holds_what_was_sent(client, recommender, caplog, monkeypatch):
    lines: list[str] = []
    handler = logging.Handler()
    handler.setFormatter(JsonLines())
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("dpformer.serve")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        client.post("/recommend", json={"histories": [["secret-item", "i01"]]})
        client.get("/items", params={"q": "secret-search"})
        client.get("/secret-path")
        client.post("/recommend", content=b'{"histories": [["secret-item"')

        def broken(self, history):
            raise KeyError(f"secret-item {history}")

        monkeypatch.setattr(type(recommender.artifact), "encode", broken)
        failed = client.post("/recommend", json={"histories": [["secret-item"]]})
    finally:
        logger.removeHandler(handler)
    assert failed.status_code == 500
    assert "secret" not in failed.text
    assert "secret" not in "".join(lines)
    entries = [json.loads(line) for line in lines]
    assert [e["status"] for e in entries if e["event"] == "request"] == [200, 200, 404, 422, 500]
    assert entries[0]["histories"] == 1
    assert next(e for e in entries if e["event"] == "failed")["error"] == "KeyError"


def test_the_page_needs_no_network_and_is_protected(client):
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in ("/", "/style.css", "/app.js"):
        text = client.get(path).text
        assert "https://" not in text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_what_should_not_be_served_is_refused(run, tmp_path, dpformer):
    assert "is missing" in dpformer("serve", tmp_path).err
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "model.safetensors").unlink()
    assert "dpformer resume" in dpformer("serve", copy).err
    for name, options in {"inf": {"epsilon": float("inf"), "seed": None}, "seeded": {}}.items():
        assert start(tmp_path / name, run.parent / "data", small_recipe(**options)).train()
        done = dpformer("serve", tmp_path / name)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "--not-private" in done.err
        assert load_for_serving(tmp_path / name, not_private=True)
    taken = dpformer("serve", run, "--host", "192.0.2.1")
    assert "192.0.2.1:8000 cannot be listened on" in taken.err


def test_values_that_are_no_numbers_are_refused(run, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(run, tmp_path / "run"))
    tensors = load_file(copy / "model.safetensors")
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, copy / "model.safetensors")
    known = json.loads((copy / "files.json").read_text())
    (copy / "files.json").write_text(json.dumps(known | {"model.safetensors": sha256(copy / "model.safetensors")}))
    with pytest.raises(DPFormerError, match=r"norm\.weight holds values that are not numbers"):
        load_for_serving(copy)


def test_concurrent_questions_share_a_forward_pass_and_get_their_own_answers():
    sizes: list[int] = []

    def work(queries):
        sizes.append(len(queries))
        return [query * 10 for query in queries]

    async def main():
        batcher = Batcher(work, size=8, wait=0.05)
        batcher.start()
        answers = await asyncio.gather(*(batcher.ask([n, n + 100]) for n in range(10)))
        await batcher.stop()
        return answers

    assert asyncio.run(main()) == [[n * 10, n * 10 + 1000] for n in range(10)]
    assert sum(sizes) == 20
    assert max(sizes) == 8
    assert len(sizes) == 3


def test_a_failing_pass_fails_those_who_asked_and_a_full_queue_is_said():
    release = threading.Event()

    def work(queries):
        release.wait(5)
        if "bad" in queries:
            raise ValueError("bad")
        return queries

    async def main():
        batcher = Batcher(work, size=1, wait=0, waiting=2)
        batcher.start()
        first = asyncio.ensure_future(batcher.ask(["bad"]))
        await asyncio.sleep(0.05)
        rest = [asyncio.ensure_future(batcher.ask([n])) for n in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(BusyError):
            await batcher.ask(["too many"])
        rest[0].cancel()  # gave up: nothing is worked for it
        release.set()
        with pytest.raises(ValueError, match="bad"):
            await first
        assert await rest[1] == [1]
        await batcher.stop()

    asyncio.run(main())


def test_a_slow_model_is_answered_for_in_time(recommender, monkeypatch):
    """The model is still at work when the answer is there: it waits for it."""
    answered = threading.Event()
    monkeypatch.setattr(recommender, "answer", lambda queries: answered.wait(60) and [[]] * len(queries))
    with TestClient(create_app(recommender, Limits(timeout=0.1))) as client:
        answer = client.post("/recommend", json={"histories": [[]]})
        answered.set()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


TOKEN = "a-token-for-tests-0123456789"


def test_a_token_is_asked_for_everywhere_but_on_the_page_and_the_probes(recommender):
    with TestClient(create_app(recommender, token=TOKEN)) as client:
        bearer = {"authorization": f"Bearer {TOKEN}"}
        body = {"histories": [["i03"]], "k": 2}
        for wrong in ({}, {"authorization": TOKEN}, {"authorization": "Bearer " + TOKEN[:-1]}, {"authorization": "é"}):
            given = {name: value.encode() for name, value in wrong.items()}
            answer = client.post("/recommend", json=body, headers=given)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert {
                client.get(p, headers=given).status_code for p in ("/items", "/privacy", "/metrics", "/version")
            } == {401}
        assert client.post("/recommend", json=body, headers=bearer).status_code == 200
        assert client.get("/version", headers=bearer).status_code == 200
        for path in ("/", "/app.js", "/style.css", "/docs", "/docs.js", "/openapi.json", "/healthz", "/readyz"):
            assert client.get(path).status_code == 200


def test_other_sites_get_no_permission(client):
    """No CORS headers: a browser then keeps the answer from a page of another origin."""
    answer = client.get("/healthz", headers={"origin": "https://example.org"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_version_names_the_run_and_the_hash_of_its_weights(client, run):
    version = client.get("/version").json()
    assert version["run"] == run.name
    assert version["sha256"] == sha256(run / "model.safetensors")


def test_a_server_with_a_full_queue_is_not_ready(recommender):
    with TestClient(create_app(recommender, Limits(waiting=0))) as client:
        assert client.get("/readyz").status_code == 503
    with TestClient(create_app(recommender)) as client:
        assert client.get("/readyz").json() == {"ready": True}


def test_the_description_of_the_api_loads_nothing_from_elsewhere(client):
    texts = [client.get(path).text for path in ("/docs", "/docs.js")]
    assert not any("http://" in text or "https://" in text for text in texts)
