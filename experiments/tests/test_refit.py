"""`dpformer reproduce refit` on an invented log."""

from dpformer.data import demo_frame
from dpformer_experiments.reproduce import refit


def test_releases_after_each_quarter():
    figures = refit.run(seeds=1, preset="transitions", epsilon=[20.0], events=demo_frame().drop("title"))
    assert 6 < figures["each"] < 10  # four of them are together 20
    assert sum(figures["evaluated"]) == 3000
    rows = {
        (row["log"], row["way"]): [release["ndcg@10"]["mean"] for release in row["releases"]] for row in figures["rows"]
    }
    assert len({values[0] for (_, way), values in rows.items() if way != refit.ONE}) == 1
    # The readers' habits do not change, so what was released before helps.
    assert rows[refit.WINDOW, refit.REFIT][3] > rows[refit.WINDOW, refit.FIT][3]
    assert rows[refit.SO_FAR, refit.ONE][3] > rows[refit.WINDOW, refit.FIT][3]
    assert "release 4" in refit.page(figures).markdown()
