"""`dpformer plan`: noise, steps, epsilon over time, what it means and what it costs, before anything is spent."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dpformer.privacy.plan import PrivacyPlan

BATCH_SIZE, EPOCHS = 1024, 100
ACCOUNTANTS = {"pld": "PLD", "rdp": "RDP", "gaussian": "the closed form for Gaussians"}


def plan(
    folder: Annotated[Path | None, typer.Argument(help="A folder made by `dpformer prepare`; or give --users.")] = None,
    users: Annotated[int | None, typer.Option(help="How many people there are.")] = None,
    epsilon: Annotated[float, typer.Option(help="The budget; inf is not private.")] = 8.0,
    delta: Annotated[float, typer.Option(help="Must be below 1/users.")] = 1e-5,
    batch_size: Annotated[
        int | None,
        typer.Option(help=f"Expected batch; as many as there are users is a full batch. {BATCH_SIZE} by default."),
    ] = None,
    epochs: Annotated[float | None, typer.Option(help=f"How often each user is seen; {EPOCHS} by default.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    release: Annotated[
        list[str] | None,
        typer.Option(help="A one-shot release paid from the budget, NAME=SHARE, such as histogram=0.03. Repeatable."),
    ] = None,
    items: Annotated[int | None, typer.Option(help="Catalogue size, for the time and memory estimate.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest sequence used, for the estimate.")] = None,
    dim: Annotated[int, typer.Option(help="Width of the model, for the estimate.")] = 64,
    blocks: Annotated[int, typer.Option(help="Blocks of the model, for the estimate.")] = 2,
    ranks: Annotated[int | None, typer.Option(hidden=True)] = None,
    trials: Annotated[float, typer.Option(help="Mean number of trials to price for tuning.")] = 10.0,
    table: Annotated[bool, typer.Option(help="Compare other budgets and batch sizes.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw epsilon over steps into this file (png, svg, pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
) -> None:
    """Noise, steps and what epsilon means, before anything is spent."""
    from dpformer.cli.output import print_json, stderr
    from dpformer.cli.plan_report import read_counts, report
    from dpformer.errors import PrivacyError
    from dpformer.privacy.plan import make_plan

    counts = read_counts(folder) if folder else {}
    count = users or int(counts.get("users", 0))
    if users is not None and users < 1:
        raise PrivacyError(f"--users {users} is not at least 1")
    if not count:
        raise PrivacyError("the number of users is not known; give --users, or a folder made by dpformer prepare")
    if ranks is not None:
        raise PrivacyError(
            "--ranks was removed: plan times one process on this machine; leave it out, and measure several with torchrun"
        )
    shape = _shape(counts, items, max_length, dim, blocks)
    shares = _shares(release or [])
    # Releases that take the whole budget leave nothing for training; then there are no steps by default.
    if epochs is None and steps is None and sum(shares.values()) < 1 - 1e-9:
        epochs = EPOCHS
    if plot and plot.suffix not in (".png", ".svg", ".pdf"):
        raise PrivacyError(f"--plot {plot} does not end in .png, .svg or .pdf")
    if plot and (math.isinf(epsilon) or (epochs is None and not steps)):
        raise PrivacyError(
            "--plot draws epsilon over steps; without steps, or with epsilon inf, there is nothing to draw"
        )
    size = min(BATCH_SIZE, count) if batch_size is None else batch_size
    with stderr.status("calibrating ..."):
        made = make_plan(count, epsilon, delta, size, epochs, steps, shares)
        figures = report(made, epochs, trials, table, shape)
        if plot:
            _draw(made, plot)
    if as_json:
        print_json(figures)
    else:
        _show(figures)
        if plot:
            stderr.print(f"wrote {plot}")


def _shape(
    counts: dict[str, float], items: int | None, max_length: int | None, dim: int, blocks: int
) -> tuple[int, float, int, int] | None:
    """Items, tokens a user, width, blocks; None where too little is known for an estimate."""
    from dpformer.errors import PrivacyError

    for name, value in (("--items", items), ("--max-length", max_length), ("--dim", dim), ("--blocks", blocks)):
        if value is not None and value < 1:
            raise PrivacyError(f"{name} {value} is not at least 1")
    items = items or int(counts.get("items", 0))
    mean = counts["events"] / counts["users"] if counts.get("users") else math.inf
    length = min(mean, max_length or math.inf)
    return (items, length, dim, blocks) if items and math.isfinite(length) else None


def _shares(releases: list[str]) -> dict[str, float]:
    from dpformer.errors import PrivacyError

    shares: dict[str, float] = {}
    for text in releases:
        name, _, share = text.partition("=")
        try:
            value = float(share)
        except ValueError:
            raise PrivacyError(f"--release {text!r} is not NAME=SHARE, such as histogram=0.03") from None
        if not 0 < value <= 1:
            raise PrivacyError(f"--release {text!r}: share {value:g} is not above 0 and at most 1")
        if name in shares:
            raise PrivacyError(f"--release {name!r} is given twice")
        shares[name] = value
    return shares


def _show(f: dict[str, Any]) -> None:
    from rich.table import Table

    from dpformer.cli.output import stdout

    private = f["epsilon"] != "inf"
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("users", f"{f['users']:,}")
    facts.add_row("budget", f"epsilon {f['epsilon']:g}, delta {f['delta']:g}" if private else "none: NOT PRIVATE")
    if f["steps"]:
        how = (
            "all users at each step" if f["sampler"] == "full" else f"Poisson, each user with {f['sampling_rate']:.5g}"
        )
        facts.add_row("noise multiplier", f"[bold]{f['noise_multiplier']:.4g}[/]")
        facts.add_row("steps", f"{f['steps']:,}  ({f['epochs']:.4g} epochs)")
        facts.add_row("expected batch", f"{f['batch_size']:,}  ({how})")
    for release in f["releases"]:
        facts.add_row(f"release {release['name']}", f"once, noise multiplier {release['noise_multiplier']:.4g}")
    spent = f["spent"]
    facts.add_row(
        "spent in the end",
        f"epsilon {_g(spent['epsilon'])} by {ACCOUNTANTS[spent['accountant']]}; cross-check by RDP {_g(spent['rdp'])}; "
        f"at delta 1/users {_g(f['epsilon_at_delta_1_over_users'])}",
    )
    if spent["note"]:
        facts.add_row("", spent["note"])
    if f["steps"] and private:
        share = f["signal_to_noise"] / f["signal_cap"]
        facts.add_row(
            "signal to noise",
            f"{f['signal_to_noise']:,.0f} = sqrt(T) B / sigma; {share:.0%} of its cap, {f['signal_cap']:,.0f}",
        )
    stdout.print(facts)
    stdout.print(f"\n{f['attack']['reading']}\n", soft_wrap=True)
    if private and len(f["tenths"]) > 1:
        over = Table(title="epsilon over the training", title_justify="left")
        over.add_column("step", justify="right")
        over.add_column("epsilon", justify="right")
        over.add_column("RDP", justify="right")
        for row in f["tenths"]:
            over.add_row(f"{row['step']:,}", _g(row["epsilon"]), _g(row["rdp"]))
        stdout.print(over)
    if f["table"]:
        stdout.print(_comparison(f["table"]))
    _show_costs(f)


def _comparison(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    sizes = sorted({row["batch_size"] for row in rows})
    steps = {row["batch_size"]: row["steps"] for row in rows}
    shown = Table(title="noise multiplier (and signal, of the cap) for other budgets and batches", title_justify="left")
    shown.add_column("epsilon", justify="right")
    for size in sizes:
        shown.add_column(f"B {size:,}\n{steps[size]:,} steps", justify="right")
    for target in sorted({row["epsilon"] for row in rows}):
        cells = {row["batch_size"]: row for row in rows if row["epsilon"] == target}
        shown.add_row(
            f"{target:g}", *(f"{cells[s]['noise_multiplier']:.3g} ({cells[s]['share_of_cap']:.0%})" for s in sizes)
        )
    return shown


def _show_costs(f: dict[str, Any]) -> None:
    from dpformer.cli.output import stdout

    if f["estimate"]:
        _show_estimate(f["estimate"])
    elif f["steps"]:
        stdout.print("for time and memory give --items and --max-length, or a folder made by dpformer prepare")
    if f["tuning"]:
        t = f["tuning"]
        noise = t["noise_multiplier_within_budget"]
        within = (
            f"noise multiplier {noise:.4g} keeps all of it within the budget"
            if noise
            else "no noise keeps it within so small a budget, as the scores alone spend more"
        )
        stdout.print(
            f"tuning: the best of {t['mean_trials']:g} trials on average ({t['distribution']} number, noisy scores) "
            f"spends epsilon {_g(t['epsilon_with_this_noise'])} with this noise (RDP); {within}.",
            soft_wrap=True,
        )


def _show_estimate(e: dict[str, Any]) -> None:
    from dpformer.cli.output import stdout

    least = "" if e["whole"] else "at least "
    stdout.print(f"estimate for one process: {e['parameters']:,} parameters, {e['assumes']}", soft_wrap=True)
    stdout.print(
        f"  a step {e['seconds']:.3g} s, all steps {_time(e['training_seconds'])}, memory {least}"
        f"{e['memory_bytes'] / 2**20:,.0f} MB",
        soft_wrap=True,
    )
    stdout.print(
        f"Timed on this machine just now: the clipping of {e['timed_tokens']:,} tokens and {e['timed_items']:,} items, "
        f"multiplied up to the {e['tokens_per_step']:,} tokens of a step. Noise and the update of the weights come on top; other "
        "programs that run at the moment make it slower.",
        soft_wrap=True,
    )


def _draw(made: "PrivacyPlan", path: Path) -> None:
    """Epsilon over steps, by both accountants."""
    import matplotlib

    from dpformer.errors import PrivacyError

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = sorted({math.ceil(made.steps * share**2 / 400) for share in range(21)})
    spent = [made.epsilon_after(step) for step in points]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(points, [one.epsilon for one in spent], label=f"epsilon, noise multiplier {made.noise_multiplier:.3g}")
    axes.plot(points, [one.rdp for one in spent], linestyle=":", label="RDP, cross-check")
    axes.axhline(made.epsilon, color="grey", linewidth=0.8)
    axes.set(xlabel="step", ylabel=f"epsilon at delta {made.delta:g}", ylim=(0, None))
    axes.legend(frameon=False)
    try:
        figure.savefig(path)
    except OSError as failure:
        raise PrivacyError(f"--plot {path} cannot be written ({failure.strerror}); choose another file") from failure
    finally:
        pyplot.close(figure)


def _g(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86400:,.0f} days"
