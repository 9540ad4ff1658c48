"""What a messy log did silently: each is right now, or an error that names the cure."""

import copy
import gc
import json
import pickle
import shutil

import polars as pl
import pytest

from dpformer import DPFormer, load_model
from dpformer.artifact.card import model_card
from dpformer.data import like, load, prepare
from dpformer.errors import DataError, DPFormerError
from dpformer.privacy import read_ledger
from dpformer.report.page import _bound, _percent_up

# File order and order of time differ: the last item of each user is "first" by the file and "last" by time.
SHOP = "customer,sku,purchased_at,qty\n" + "".join(
    f"{user},{item},{day:02}.02.2025 10:00,{qty}\n"
    for user in range(30)
    for item, day, qty in (("last", 9, 1), ("returned", 8, 0), ("middle", 5, 2), ("first", 1, 1), ("first", 1, 1))
)
READ = ("--user", "customer", "--time", "purchased_at")


@pytest.fixture
def shop(tmp_path):
    path = tmp_path / "c.csv"
    path.write_text(SHOP)
    return path


@pytest.fixture
def run(shop, tmp_path, dpformer):
    options = (*READ, "--where", "qty > 0", "--dedupe")
    assert dpformer("prepare", shop, *options, "-o", tmp_path / "data").code == 0
    fit = ("--preset", "transitions", "--epsilon", "8", "--delta", "1e-3", "--set", "hold_out=nothing")
    done = dpformer("fit", tmp_path / "data", "--run", tmp_path / "run", *fit)
    assert done.code == 0, done
    assert "dpformer evaluate" not in done.err, "it would refuse"
    return tmp_path / "run"


def items(dataset, user=0):
    ids = dataset.catalogue["item_id"].to_list()
    return [ids[item - 1] for item in dataset.sequences[user]]


def test_a_further_log_is_read_like_the_first(run, shop, tmp_path, dpformer):
    log = load_model(run).log
    assert log["options"] == {
        **{"user": "customer", "time": "purchased_at", "where": "qty > 0", "dedupe": True},
    }
    again = prepare(shop, **like(log))
    assert items(again) == items(load(tmp_path / "data")) == ["first", "middle", "last"]
    done = dpformer("recommend", run, "--file", shop, "-k", "1", "--seen", "-o", tmp_path / "out.parquet")
    assert done.code == 0, done
    assert "timestamp = purchased_at; times as dates, 2025-02-01" in done.err
    dropped = "dropped 30 events that the condition on the log (--log-where) does not keep"
    assert f"{dropped}\npeople who have no other events get no list" in done.err
    expected = load_model(run).recommend([["first", "middle", "last"]], k=1, seen=True)["item_id"][0]
    written = pl.read_parquet(tmp_path / "out.parquet")
    assert set(written["item_id"]) == {expected}
    assert written["user_id"].to_list() == list(range(30)), "ids keep their type, so that a join works"
    other = tmp_path / "d.csv"
    other.write_text(SHOP.replace("purchased_at", "day"))
    refused = dpformer("recommend", run, "--file", other)
    assert "no column 'purchased_at' for --time" in refused.err
    assert dpformer("recommend", run, "--file", other, "--time", "day", "--log-where", "qty > 1", "--json").code == 0
    refused = dpformer("recommend", run, "--file", shop, "--where", "qty > 1")
    assert "no column 'qty'" in refused.err
    assert "a condition on events of the log is --log-where" in refused.err
    model = DPFormer.load(run)
    assert set(model.recommend(log=shop, k=1, seen=True)["item_id"]) == {expected}
    with pytest.raises(DPFormerError, match="'purchased_at' for time;"):
        model.recommend(log=other)


def test_a_damaged_record_of_the_reading_is_refused():
    for record in (
        {"options": {"user": 3}},
        {"options": {"min_events": 5}},
        {"columns": []},
        {"columns": {"user_id": 1}},
    ):
        with pytest.raises(DataError, match="damaged"):
            like(record)


def test_times_that_are_not_used_are_an_error(shop, tmp_path, dpformer):
    refused = dpformer("prepare", shop, "--user", "customer", "-o", tmp_path / "x")
    assert refused.code == 2
    assert "--time purchased_at, or --no-time" in refused.err
    assert items(prepare(shop, user="customer", no_time=True))[-1] == "first"
    for name, values in {
        "order_date": ["2025-02-01", "2025-02-02", "", "n/a", "2025-03-01"],
        "purchase_date": [1_738_000_000, 1_738_000_001, None, 1_738_000_001, 1_738_000_001],
        "zoned": ["2025-02-01 10:00 Europe/Berlin"] * 5,
        "us": ["5/17/2025 9:00 PM", "12/1/2025", "1/2/2026", "1/2/26", ""],
        "month": ["17 May 2025", "Sat, 17 May 2025 10:00", "May 17, 2025", "17-may-2025", "soon"],
    }.items():
        frame = pl.DataFrame({"user_id": [1, 1, 1, 2, 2], "item_id": list("abcab"), name: values})
        frame.write_ndjson(tmp_path / "log.jsonl")
        for log in (frame, tmp_path / "log.jsonl"):
            with pytest.raises(DataError, match=f"time='{name}', or no_time=True"):
                prepare(log)
    ids = pl.DataFrame({"user_id": [1, 1], "item_id": ["a", "b"], "price": [10.5, 1999.0], "note": ["x", "2025-01-01"]})
    assert len(prepare(ids).sequences) == 1
    with pytest.raises(DataError, match="contradict"):
        prepare(ids, time="price", no_time=True)


def test_a_second_column_of_times_is_an_error_unless_one_of_them_is_named():
    """A column may be called `created_at` and tell when the account was made."""
    log = pl.DataFrame(
        {
            "user_id": [1, 1],
            "item_id": ["b", "a"],
            "created_at": ["2020-01-01", "2020-01-02"],
            "purchased_at": ["2025-01-02", "2025-01-01"],
            "phone": [1_700_000_000, 1_700_000_001],
        }
    )
    with pytest.raises(DataError, match="sorted by 'created_at'; give time='purchased_at', or time='created_at'"):
        prepare(log)
    assert items(prepare(log, time="purchased_at"))[0] == "a"
    dataset = prepare(log, time="created_at")
    assert items(dataset)[0] == "b"
    assert items(prepare(log, **like(dataset.log)))[0] == "b"
    assert items(prepare(log.drop("purchased_at")))[0] == "b"  # a number beside a column of times may be anything
    amazon = log.drop("purchased_at", "phone").with_columns(reviewTime=pl.lit("01 5, 2013"), unixReviewTime=pl.lit(1))
    assert len(prepare(amazon).sequences) == 1  # other names for the time


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        (["02.02.2025 10:00", "01.02.2025 10:00"], {}),
        (["02.02.2025", "01.02.2025"], {}),
        (["2025-02-01 10:30 Europe/Berlin", "2025-02-01 09:15 UTC"], {}),  # 09:30 and 09:15 in UTC
        (["2025-02-01T10:30:00+01:00[Europe/Berlin]", "2025-02-01T09:15:00Z"], {}),
        (["01/03/2025 09:00", "02/01/2025 09:00"], {"time_format": "%d/%m/%Y %H:%M"}),
        (["20250301", "20250102"], {"time_format": "%Y%m%d"}),
        (["1.3.2025 09:00:00 +0100", "1.3.2025 07:59:00 +0000"], {"time_format": "%d.%m.%Y %H:%M:%S %z"}),
    ],
)
def test_times_as_people_write_them(texts, options):
    frame = pl.DataFrame({"user_id": ["u"] * 2, "item_id": ["later", "sooner"], "time": texts})
    assert items(prepare(frame, **options)) == ["sooner", "later"]


def test_times_that_cannot_be_read_name_the_cure():
    frame = pl.DataFrame({"user_id": ["u"] * 2, "item_id": ["a", "b"], "time": ["01/02/2025", "02/02/2025"]})
    with pytest.raises(DataError, match="the format with time_format"):
        prepare(frame)
    with pytest.raises(DataError, match="cannot be used"):
        prepare(frame, time_format="%Q")


def test_whole_numbers_beside_missing_values_are_whole_numbers():
    """pandas makes floats of them: 7.0 is user 7, and a join by user_id works."""
    frame = pl.DataFrame({"customer": [7.0, 7.0, 10.0, None], "sku": [1.0, 2.0, float("nan"), 1.0]})
    dataset = prepare(frame, drop_missing=True)
    assert dataset.sequences.users.to_list() == [7]
    assert dataset.catalogue["item_id"].to_list() == [1, 2]
    with pytest.raises(DataError, match=r"row 3, column 'sku': this float is not an id"):
        prepare(frame.fill_nan(3.5), drop_missing=True)


def test_histories_are_lists_of_lists(run):
    model = DPFormer.load(run)
    for wrong in (["260"], [260], "260", [b"x"]):
        for recommend in (model.recommend, load_model(run).recommend):
            with pytest.raises(DPFormerError, match=r"list of lists|a history is a list"):
                recommend(histories=wrong)
    with pytest.raises(DPFormerError):
        model.recommend(users="ann")


def test_no_pickle_of_people():
    frame = pl.DataFrame({"user_id": [f"person-{u}" for u in range(30) for _ in "abc"], "item_id": list("abc") * 30})
    model = DPFormer("transitions", epsilon=8, delta=1e-3)
    assert copy.deepcopy(model).recipe == model.recipe
    model.fit(frame)
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(DPFormerError, match="save"):
            way(model)


def test_the_ledger_of_a_fit_without_a_folder_stays_until_it_is_saved(tmp_path):
    frame = pl.DataFrame({"user_id": [u for u in range(30) for _ in "abc"], "item_id": list("abc") * 30})
    model = DPFormer("transitions", epsilon=8, delta=1e-3).fit(frame)
    first, spent = model.folder, read_ledger(model.folder).spent()
    model.fit(frame)
    second = model.folder
    assert first != second
    model.save(tmp_path / "model")
    del model
    gc.collect()
    assert read_ledger(first).spent() == spent
    assert {path.name for path in first.iterdir()} == {"ledger.jsonl", "ledger.head", "config.json", "privacy.json"}
    assert not second.parent.exists(), "saved: its ledger is in the folder of the model"
    assert read_ledger(tmp_path / "model").spent() == spent
    shutil.rmtree(first.parent)


def test_missing_values_are_counted_once_for_all_columns(tmp_path, dpformer):
    rows = ["ann,a,5", "NULL,b,6", " ,c,7", "nan,d,8", "ann,None,9", "ann,e,n/a", "ann,f,", "ann,g,10"]
    log = tmp_path / "log.csv"
    log.write_text("user,item,time\n" + "\n".join(rows) + "\n")
    refused = dpformer("prepare", log, "-o", tmp_path / "x")
    assert refused.code == 2
    assert "row 2, column 'user': no user ('NULL' means missing)" in refused.err
    assert "(rows: 3 without user, 1 without item, 2 without time)" in refused.err
    done = dpformer("prepare", log, "--drop-missing", "-o", tmp_path / "out")
    assert "dropped 6 events without user, item or time" in done.err
    assert items(load(tmp_path / "out")) == ["a", "g"]
    real = pl.DataFrame({"user_id": ["None", "None", "-1"], "item_id": ["a", "b", "c"]})
    assert prepare(real, null_values=[]).sequences.users.to_list() == ["-1", "None"]
    dropped = prepare(real, null_values=["-1"], drop_missing=True)
    assert (dropped.sequences.users.to_list(), dropped.manifest["counts"]["missing"]) == (["None"], 1)
    numbers = pl.DataFrame({"user_id": [1, 1, -1, None], "item_id": [1, 2, 3, 4]})
    assert prepare(numbers, null_values=["-1"], drop_missing=True).sequences.users.to_list() == [1]
    with pytest.raises(DataError, match="no event is left"):
        prepare(real, null_values=["none", "-1"], drop_missing=True)


def test_suspicious_ids_are_named():
    users = ["unknown"] * 3 + ["Ann", "Ann", "ann ", "ann "] + ["bob"] * 2 + ["busy"] * 500
    log = pl.DataFrame({"user_id": users, "item_id": [str(n % 7) for n in range(len(users))]})
    notes = " ".join(prepare(log).manifest["notes"])
    for said in ("user 'busy' has 500 events", "user 'unknown' has 3 events", "such as 'Ann' and 'ann '"):
        assert said in notes
    assert "'bob'" not in notes
    assert "give --fold-users" in notes
    folded = prepare(log, fold_users=True)
    assert folded.sequences.users.to_list() == ["ann", "bob", "busy", "unknown"]
    assert folded.sequences.lengths.tolist() == [4, 2, 500, 3]
    assert "fold-users" not in " ".join(folded.manifest["notes"])
    assert like(folded.log)["fold_users"] is True


CONDITIONS = {
    "qty > 0": [0, 2],
    "shop = 'north' and qty >= 1": [0],
    "not gift": [0, 1],
    "gift = true or qty between 2 and 3": [2],
    "qty in (1, 0)": [0, 1],
    "shop in ('south') and qty is not null and qty < 2": [1],
    "qty * 2 > 2 or lower(shop) like 'nor%'": [0, 2],
}


@pytest.mark.parametrize("text", CONDITIONS)
@pytest.mark.parametrize("kind", ["frame", "csv", "jsonl", "parquet"])
def test_conditions_on_events(text, kind, tmp_path):
    """The same rows whether the file has types or not."""
    frame = pl.DataFrame(
        {
            **{"user_id": ["u"] * 3, "item_id": ["0", "1", "2"], "qty": [1, 0, 2]},
            **{"shop": ["north", "south", "south"], "gift": [False, False, True]},
        }
    )
    log = frame if kind == "frame" else tmp_path / f"log.{kind}"
    if kind != "frame":
        {"csv": frame.write_csv, "jsonl": frame.write_ndjson, "parquet": frame.write_parquet}[kind](log)
    dataset = prepare(log, where=text, single_events=True)
    assert items(dataset) == [str(row) for row in CONDITIONS[text]]
    assert dataset.manifest["counts"].get("where", 0) == 3 - len(CONDITIONS[text])


@pytest.mark.parametrize(
    "text", ["qty > avg(qty)", "sum(qty) over (partition by user_id) > 1", "row_number() over () > 1", "count(*) > 1",
             "first(qty) > 0", "qty = max(qty)", "qty > (select max(qty) from self)"],
)  # fmt: skip
def test_a_condition_that_looks_at_other_rows_is_refused(text):
    frame = pl.DataFrame({"user_id": ["u"] * 2, "item_id": ["a", "b"], "qty": [1, 2]})
    with pytest.raises(DataError, match=r"one row alone|cannot be read"):
        prepare(frame, where=text)


def test_errors_of_conditions_name_the_row_of_the_file(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("user,item,qty\nu,a,0\nu,b,1\nu,c,few\n")
    with pytest.raises(DataError, match="row 3, column 'qty': 'few' is not a number"):
        prepare(log, where="qty > 0")
    log.write_text("user,item,qty\nu,a,0\nu,b,1\n,c,1\n")
    with pytest.raises(DataError, match="row 3, column 'user': no user"):
        prepare(log, where="qty > 0")
    for wrong, said in (("nope > 1", "no column 'nope'"), ("qty >", "cannot be read"), ("lower(qty)", "does not fit")):
        with pytest.raises(DataError, match=said):
            prepare(log, where=wrong)
    with pytest.raises(DataError, match="no event is left of 3 after where='qty > 5'"):
        prepare(log, where="qty > 5")


def test_one_unknown_user_does_not_end_a_batch(run, tmp_path, dpformer, shop):
    done = dpformer("recommend", run, "--file", shop, "--users", "3,nobody,4", "-k", "1", "--seen", "--json")
    assert [row["user_id"] for row in json.loads(done.out)] == [3, 4]
    assert "not in the log, left out: 1 (nobody)" in done.err
    assert "no user 'nobody'" in dpformer("recommend", run, "--file", shop, "--users", "nobody").err
    model = DPFormer.load(run)
    with pytest.warns(UserWarning, match="nobody"):
        frame = model.recommend(users=[4, "nobody"], log=shop, k=1, seen=True)
    assert frame["user_id"].to_list() == [4]


def test_card_and_report_are_true_of_the_run(run, dpformer, tmp_path):
    card = (run / "README.md").read_text()
    assert "dpformer prepare LOG --user customer --time purchased_at --where 'qty > 0' --dedupe -o DATA" in card
    assert "Nothing was held out" in card
    config = json.loads((run / "config.json").read_text())
    config["recipe"]["hold_out"] = "test"
    assert "each user's last item:" in model_card(load_model(run).model.spec, load_model(run).statement, config)
    assert dpformer("report", run, "-o", tmp_path / "report.html").code == 0
    page = (tmp_path / "report.html").read_text()
    assert "dpformer evaluate" not in page
    assert "--time purchased_at" in page
    assert [_percent_up(value) for value in (0.2545, 0.25, 0.251, 1.0)] == ["26", "25", "26", "100"]
    assert [_bound(value) for value in (9.0972437, 5.9999929, 8.0, 0.84911, "inf")] == [
        "9.098",
        "6",
        "8",
        "0.8492",
        "inf",
    ]
