"""Was a run charged to its account of people, in full and before it asked, and is the stated total right?"""

from __future__ import annotations

from pathlib import Path

from dpformer.artifact.layout import LOCAL
from dpformer.files import read_json
from dpformer.privacy import PrivacyStatement, read_ledger
from dpformer.privacy.account import PeopleAccount
from dpformer.trust.verify.checks import NotChecked, Outcome
from dpformer.trust.verify.folder import ROOM, interval


def account_against_run(folder: Path, statement: PrivacyStatement) -> Outcome:
    """The line of the account that the ledger begins with is this run's whole plan, and the statement's total is the sum.

    The ledger's header holds the hash of that line, and each line of the ledger the hash of the one before: so the account was
    charged before the first answer.
    """
    said = statement.account
    assert said is not None
    ledger = read_ledger(folder)
    receipt, plan = ledger.receipt, ledger.plan
    if receipt is None:
        return Outcome(False, "the statement has an account, and the ledger does not begin with a receipt of one")
    local = read_json(folder / LOCAL) if (folder / LOCAL).exists() else {}
    if not Path(local.get("account", "nowhere")).exists():
        raise NotChecked("the account is not where it was when the run began")
    spending = PeopleAccount(local["account"]).read().upto(receipt, str(folder))
    line = spending.runs[-1]
    charged = (line.run_id, line.charges, line.threshold_delta)
    wrong = []
    if charged != (ledger.run_id, plan.charges(), plan.threshold_delta):
        wrong.append(f"charge {receipt.entries} of the account is not this run's plan")
    if (said.id, said.runs, said.hash) != (receipt.account, receipt.entries, receipt.hash):
        wrong.append("the statement is of another charge than the ledger")
    cap = spending.cap
    if (said.cap, said.delta, bool(said.period)) != (cap.epsilon, cap.delta, bool(cap.per)):
        wrong.append("the statement has another cap than the account")
    lines, counts = [], []
    if statement.alone is not None:  # the model uses earlier runs, so its pair is of all of them
        counts += [("what counts for the model", spending.runs, statement.epsilon, statement.delta)]
        counts += [("at delta 1/users", spending.runs, statement.epsilon_at_delta_1_over_users, 1 / statement.users)]
    for what, runs, stated, delta in (
        ("in all", spending.runs, said.epsilon, cap.delta),
        ("against the cap", spending.counted(line.time), said.epsilon_in_period, cap.delta),
        *counts,
    ):
        left = delta - sum(run.threshold_delta for run in runs)
        low, high, how = interval([charge for run in runs for charge in run.charges], left)
        if not low * (1 - ROOM) <= float(stated) <= high * (1 + ROOM):
            wrong.append(f"{what} {float(stated):.4f} is stated")
        lines.append(f"{what} {how}")
    return Outcome(not wrong, "; ".join([*wrong, f"charge {receipt.entries}", *lines]))
