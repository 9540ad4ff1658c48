"""A shop's weeks with dpformer, from a messy log to a server: every command that it types, and what comes of it.

    python examples/shop/shop.py [FOLDER] [PEOPLE]

It invents three weeks of purchases and a table of products. Each step is one function; commands are printed as typed.
The last two steps need the extras `serve` and `onnx`.
"""

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpformer.cli import main as command_line

HERE = Path(__file__).parent
CATEGORIES = ["tea", "coffee", "cake", "cup"]
READING = [
    *("--catalogue", "products.csv", "--title", "name", "--features", "category,price:4"),
    *("--user", "customer", "--item", "sku", "--time", "purchased_at", "--time-format", "%d.%m.%Y %H:%M"),
    *("--drop-missing", "--dedupe", "--where", "qty > 0"),
]


def products(count: int) -> pl.DataFrame:
    """The product table. Nobody has bought the last tenth yet."""
    sku = pl.int_range(100, 100 + count, eager=True)
    category = [CATEGORIES[n % 4] for n in range(count)]
    names = [f"{kind.title()} no. {n}" for n, kind in zip(sku, category, strict=True)]
    price = [round(2 + n % 9 * 1.5, 2) for n in range(count)]
    return pl.DataFrame({"sku": sku, "name": names, "category": category, "price": price, "in_stock": sku % 5 != 0})


def week(number: int, people: int, count: int) -> pl.DataFrame:
    """One week's log, as shops have it: returns (qty -1), rows written twice, missing customers, dates as text."""
    random = np.random.default_rng(number)
    rows = []
    for customer in range(people):
        here = int(random.integers(count))
        for _ in range(int(random.integers(3, 10))):
            when = 60 * int(random.integers(7 * 24)) + int(random.integers(60))
            name = "NULL" if random.random() < 0.01 else str(50_000 + customer)
            text = f"{number * 7 + 1 + when // 1440:02d}.03.2025 {when // 60 % 24:02d}:{when % 60:02d}"
            rows.append((name, 100 + here, -1 if random.random() < 0.03 else 1, text))
            here = (here + 4 * int(random.integers(1, 3))) % (count * 9 // 10)  # often the same category
    rows += rows[:: len(rows) // 20]
    return pl.DataFrame(rows, schema=["customer", "sku", "qty", "purchased_at"], orient="row")


def dpformer(*words: str, fails: bool = False) -> None:
    """Type a command, in this process. fails: it is to be refused."""
    print(f"\n$ dpformer {shlex.join(words)}")
    sys.argv = ["dpformer", *words]
    code: Any = 0
    with redirect_stderr(sys.stdout):
        try:
            command_line()
        except SystemExit as end:
            code = end.code
    if bool(code) != fails:
        raise SystemExit(f"the command {'was not refused' if fails else 'failed'}")


def first_week(delta: str) -> None:
    """Read the log as it is, open an account for these people, and fit the first model on a part of it."""
    dpformer("prepare", "week1.csv", "-o", "week1", *READING)
    dpformer("account", "new", "people.account", "--epsilon", "14", "--delta", delta)
    dpformer("fit", "week1", "--run", "runs/week1", "--epsilon", "8", "--delta", delta, "--account", "people.account",
             "--preset", "distilled", "--set", "distil.steps=100", "--quiet")  # fmt: skip
    dpformer("evaluate", "runs/week1")


def use_it() -> None:
    """Lists for everybody, with filters; what is alike."""
    Path("not-again.csv").write_text("customer,sku\n50001,104\n50001,108\n")
    dpformer("recommend", "runs/week1", "--all", "week1.csv", "-k", "5", "-o", "recommendations.parquet",
             "--where", "in_stock and price < 12", "--exclude", "100,101", "--exclude-for", "not-again.csv")  # fmt: skip
    print(pl.read_parquet("recommendations.parquet").head(5))
    dpformer(
        "recommend", "runs/week1", "--history", "Tea no. 104, Tea no. 112", "-k", "3", "--where", "category = 'tea'"
    )
    dpformer("similar", "runs/week1", "104", "-k", "3")


def second_week() -> None:
    """The same recipe on the next log and the same account; compared on events that neither model has seen. Then the cap."""
    dpformer("refit", "runs/week1", "week2.csv", "--run", "runs/week2", "--quiet")
    pl.concat([pl.read_csv(f"week{number}.csv", infer_schema=False) for number in (1, 2, 3)]).write_csv("all-weeks.csv")
    dpformer("prepare", "all-weeks.csv", "-o", "compare", *READING, "--split", "time", "--date", "2025-03-22")
    dpformer("evaluate", "runs/week1", "runs/week2", "--data", "compare")
    dpformer("account", "show", "people.account")
    dpformer("refit", "runs/week2", "week3.csv", "--run", "runs/week3", "--quiet", fails=True)


def ask(url: str, body: dict[str, Any] | None = None, token: str = "") -> tuple[int, Any]:
    """One request; status and answer."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def started(*command: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """A server and its address, which it prints as JSON."""
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **environment}
    )
    text = ""
    while not text.endswith("}\n"):
        line = server.stdout.readline() if server.stdout else ""
        if not line:
            raise SystemExit("the server did not start")
        text += line
    return server, json.loads(text)["url"]


def serve() -> None:
    """Serve the model of week 1 behind a link, with a token; point the link to week 2 while it runs."""
    token = "a-token-that-nobody-guesses"
    os.symlink("runs/week1", "current")
    print("\n$ DPFORMER_TOKEN=... dpformer serve current --watch --port 0 --json &")
    command = [sys.executable, "-m", "dpformer", "serve", "current", "--watch", "--port", "0", "--json"]
    server, url = started(*command, DPFORMER_TOKEN=token)
    try:
        asked = {"histories": [["Tea no. 104"]], "k": 3, "where": "in_stock"}
        print("without the token:", ask(f"{url}/recommend", asked)[0])
        print("with it:", [row["title"] for row in ask(f"{url}/recommend", asked, token)[1]["rankings"][0]["items"]])
        print("served:", ask(f"{url}/version", token=token)[1]["run"])
        os.symlink("runs/week2", "next")
        os.replace("next", "current")
        for _ in range(300):
            if ask(f"{url}/version", token=token)[1]["run"] == "week2":
                break
            time.sleep(0.1)
        print("served after the link was moved:", ask(f"{url}/version", token=token)[1]["run"])
    finally:
        stop(server)


def stop(server: subprocess.Popen[str]) -> None:
    """Ask it to end; a busy machine may need a second word."""
    server.terminate()
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()


def serve_onnx() -> None:
    """The same model in ONNX Runtime, by a server that imports neither torch nor dpformer."""
    dpformer("export", "runs/week2", "--onnx", "-o", "exported")
    print("\n$ python onnx_server.py exported")
    server, url = started(sys.executable, str(HERE / "onnx_server.py"), "exported")
    try:
        answer = ask(f"{url}/recommend", {"history": ["104", "112"], "k": 3})[1]
        print("from ONNX:", [row["title"] for row in answer["items"]], "imported:", answer["imported"])
    finally:
        stop(server)


def main(folder: str = "shop", people: int = 3000) -> None:
    """Everything, in a new folder."""
    os.makedirs(folder)
    os.chdir(folder)
    count = max(40, people // 30)
    products(count).write_csv("products.csv")
    for number in (1, 2, 3):
        week(number, people, count).write_csv(f"week{number}.csv")
    first_week(f"{0.1 / people:g}")
    use_it()
    second_week()
    serve()
    serve_onnx()


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
