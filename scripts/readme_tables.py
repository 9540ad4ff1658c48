"""The two tables of figures in README.md, from docs/results: `python scripts/readme_tables.py README.md` writes them anew."""

import json
import math
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "docs" / "results"
SETS = {"table-1": "ML-1M", "table-2": "Games"}
EPSILONS = (5.0, 8.0, 10.0)
# Label, method of docs/results/table-*.json, and which of its figures.
ROWS = (
    ("popularity, not private", "popularity, not private", "ndcg@10"),
    ("the paper's DPFormer, as reported (delta not stated)", "DPFormer, pure", "reported ndcg@10"),
    ("**`dpformer`**: a Transformer trained by DP-SGD", "DPFormer, pure, all but the test item", "ndcg@10"),
    (
        "**`default`**: that Transformer and statistics, from one budget",
        "DPFormer with a private prior, all but the test item",
        "ndcg@10",
    ),
    ("`transitions`: statistics, no network", "DP transitions, all but the test item", "ndcg@10"),
    (
        "`distilled`: statistics and a Transformer that learns from them",
        "DP transitions and the distilled Transformer, all but the test item",
        "ndcg@10",
    ),
)
RATIOS = {
    "private_over_plain": "plain PyTorch without privacy, micro-batches of the same size in tokens",
    "private_over_own_nonprivate": "our own loop without privacy",
    "private_over_opacus_hooks": "Opacus hooks, the same micro-batches",
    "private_over_opacus_padded": "Opacus, padded to the greatest length",
}


def results() -> str:
    """NDCG@10 by method and epsilon, on both data sets."""
    records = {}
    for name in SETS:
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            records[name, row["method"], float(row["epsilon"])] = row
    head = ["NDCG@10, %"]
    for title in SETS.values():
        head += [f"{title}, epsilon {EPSILONS[0]:g}", *(f"{e:g}" for e in EPSILONS[1:])]
    rows = []
    for label, method, key in ROWS:
        figures = [records.get((name, method, e), {}).get(key) for name in SETS for e in EPSILONS]
        if not any(figures):  # not private: one figure for each data set
            without = {name: records.get((name, method, math.inf), {}).get(key) for name in SETS}
            figures = [without[name] if e == EPSILONS[0] else None for name in SETS for e in EPSILONS]
        if any(figures):  # a method that has not been run has no row
            rows.append((label, ["" if figure is None else f"{figure:.2f}" for figure in figures]))
    return _table(head, rows)


def speed() -> str:
    """Private training over others, and its memory."""
    report = json.loads((RESULTS / "performance.json").read_text())
    ratios = {name: report["ratios"][name] for name in RATIOS}
    kept = {key: load["kept_memory"]["private"]["over_plain"]["median"] for key, load in report["workloads"].items()}
    named = [(f"speed over {text}", ratios[name]) for name, text in RATIOS.items()]
    named.insert(1, ("the same, where the allocator keeps freed memory", kept))
    named.append(("peak memory over plain PyTorch, 4,096 users", report["ratios"]["memory_over_plain_4096"]))
    rows = [(label, [f"{values[key]:.2g} x" for key in ("ml-1m", "games")]) for label, values in named]
    return _table(["private training", "ML-1M", "Games"], rows)


def _table(head: list[str], rows: list[tuple[str, list[str]]]) -> str:
    lines = [head, ["---"] * len(head), *([label, *cells] for label, cells in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(text: str) -> str:
    """README.md with both tables made anew, between the comments that name them."""
    for name, table in (("results", results()), ("speed", speed())):
        mark = re.compile(rf"(<!-- {name}: [^\n]*-->\n)(\n|\|[^\n]*\n)*")
        if len(mark.findall(text)) != 1:
            raise SystemExit(f"README.md: one comment <!-- {name}: ... --> is needed")
        text = mark.sub(lambda match, table=table: f"{match[1]}\n{table}\n\n", text)
    return text


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(fill(Path(sys.argv[1]).read_text()))
