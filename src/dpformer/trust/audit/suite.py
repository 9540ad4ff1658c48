"""The audit of one setting: each attack on many fits, and the same attack on a planted defect, in the same run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpformer.artifact import load
from dpformer.artifact.layout import ANSWERS
from dpformer.models import Popularity
from dpformer.privacy import Curator, PrivacyPlan, read_ledger
from dpformer.privacy.replay import read_answers
from dpformer.trust.audit.attacks import Attacker, Entries, first, published_scores
from dpformer.trust.audit.bounds import CONFIDENCE, GAUSSIAN_CONFIDENCE, claimed_mu, epsilon_refuted, mu_refuted
from dpformer.trust.audit.game import Exact, Game, OldNoise, Scaled, Setting
from dpformer.trust.verify.ledger import gaussian_epsilon
from dpformer.trust.verify.own import make_model, setup_of

GUESSED = 0.01
"""The share of the coins that is guessed for the reading of any mechanism: the surest, half of them each way."""

CONTROL = 5
"""A control has a fifth of the fits: its defects are large."""

LIKELIHOOD, PUBLISHED, FLOATING = "likelihood of the answers", "published model", "floating point"
# What is attacked, and the planted defect.
WHAT = {
    LIKELIHOOD: ("the noisy answers in answers/: likelihood ratio along each canary's vector", "half of the noise"),
    PUBLISHED: (
        "model.safetensors: what it learned of each canary's next items, or its scores at each canary's pairs",
        "a model of exact sums",
    ),
    FLOATING: (
        "each number of the answers and of a popularity: can it come from a sum without the canary?",
        "float32 noise without a grid",
    ),
}
NOT_ATTACKED = (
    "the cipher and its keys",
    "the time that a fit takes and other side channels",
    "the data before it is prepared",
    "the choice of items of a private catalogue (verify: items chosen)",
    "the sampler of the steps (verify: sampler)",
)
Verdict = Literal["holds", "REFUTED", "no verdict"]


@dataclass(frozen=True)
class Finding:
    """What an attack reached: right guesses of all coins and of the surest, and what they refute (0: nothing)."""

    canaries: int
    correct: int
    guesses: int
    surest_correct: int
    mu: float
    epsilon_gaussian: float
    epsilon_any: float


@dataclass(frozen=True)
class Attack:
    """An attack, its control, and what they say of the claim."""

    name: str
    what: str
    defect: str
    found: Finding
    control: Finding
    claimed_epsilon: float
    claimed_mu: float

    @property
    def caught(self) -> bool:
        """Whether the planted defect was noticed."""
        return self._refutes(self.control)

    @property
    def verdict(self) -> Verdict:
        """Nothing is said by an attack that misses its planted defect."""
        if self._refutes(self.found):
            return "REFUTED"
        return "holds" if self.caught else "no verdict"

    def _refutes(self, found: Finding) -> bool:
        return found.mu > self.claimed_mu or found.epsilon_any > self.claimed_epsilon

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "caught": self.caught, "verdict": self.verdict}


@dataclass(frozen=True)
class Audit:
    """All attacks on one setting."""

    setting: str
    seed: int
    fits: int
    epsilon: float
    delta: float
    mu: float
    attacks: list[Attack]

    @property
    def problems(self) -> list[str]:
        """What refutes the claim, and which attacks say nothing."""
        refuted = [f"{a.name}: the claim is REFUTED" for a in self.attacks if a.verdict == "REFUTED"]
        missed = [f"{a.name}: its planted defect was not caught" for a in self.attacks if a.verdict == "no verdict"]
        return refuted + missed

    @property
    def passed(self) -> bool:
        """Whether no attack refutes the claim, and the strongest one has a verdict."""
        return self.attacks[0].verdict == "holds" and all(a.verdict != "REFUTED" for a in self.attacks)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        own = {name: value for name, value in self.__dict__.items() if name != "attacks"}
        confidence = {"any": CONFIDENCE, "gaussian": GAUSSIAN_CONFIDENCE}
        attacks = [attack.to_json() for attack in self.attacks]
        return {**own, "confidence": confidence, "passed": self.passed, "problems": self.problems, "attacks": attacks}


@dataclass
class _Heard:
    """What the attacks say of the canaries of all fits: scores that rise with the chance of being in, and certain ones."""

    ratio: list[np.ndarray] = field(default_factory=list)
    liked: list[np.ndarray] = field(default_factory=list)
    told: list[np.ndarray] = field(default_factory=list)
    inside: list[np.ndarray] = field(default_factory=list)


def audit(setting: Setting, on_part: Callable[[str], None] = lambda name: None) -> Audit:
    """Fit many times, attack each folder; then fit with each planted defect, and attack those."""
    few = max(2, setting.fits // CONTROL)
    with tempfile.TemporaryDirectory(prefix="dpformer-audit-") as name:
        play = partial(_play, setting, Path(name))
        on_part(f"{setting.fits} fits of {setting.canaries:,} canaries")
        sound = play("fits", setting.fits, Curator)
        on_part("control: half of the noise")
        half = play("half", few, partial(Curator, noise=Scaled(0.5)))
        on_part("control: exact sums in the model")
        exact = play("exact", few, Exact)
        on_part("control: noise in float32 without a grid")
        old = play("old", 1, partial(OldNoise, seed=setting.seed))
        plan: PrivacyPlan = read_ledger(Path(name) / "fits" / "fit-0").plan
    charges = plan.charges()
    claim, mu = plan.total.epsilon, claimed_mu(charges, plan.delta)
    read = partial(_finding, delta=plan.delta)
    compared = {
        LIKELIHOOD: (read(sound.ratio, sound.inside), read(half.ratio, half.inside)),
        PUBLISHED: (read(sound.liked, sound.inside), read(exact.liked, exact.inside)),
        FLOATING: (_certain(sound, plan.delta), _certain(old, plan.delta)),
    }
    attacks = [Attack(name, *WHAT[name], *findings, claim, mu) for name, findings in compared.items()]
    return Audit(setting.name, setting.seed, setting.fits, claim, plan.delta, mu, attacks)


def _play(setting: Setting, place: Path, name: str, fits: int, make: Callable[..., Any]) -> _Heard:
    heard = _Heard()
    for fit in range(fits):
        game = setting.play(place / name, fit, make)
        attacker = _attack(game)
        heard.ratio.append(attacker.ratio)
        heard.told.append(first(attacker.told, _published_told(game)))
        heard.liked.append(published_scores(load(game.folder).model, game.canaries, attacker.before))
        heard.inside.append(game.inside)
    return heard


def _attack(game: Game) -> Attacker:
    """Replay the stages of a folder with its answers, which also makes the model again."""
    plan = read_ledger(game.folder).plan
    answers, seed = getattr(game.curator, "heard", None), 0
    if answers is None:
        about, answers = read_answers(game.folder / ANSWERS)
        seed = int(about["seed"])
    attacker = Attacker(answers, game.canaries, game.inside, plan.rate)
    make_model(setup_of(game.folder, seed), attacker)
    return attacker


def _published_told(game: Game) -> np.ndarray:
    """The floating-point attack on a released popularity, which is the noisy histogram in float32."""
    model = load(game.folder).model
    if not isinstance(model, Popularity):
        return np.zeros(len(game.inside), dtype=np.int64)
    # Each canary has one item: its vector is 1 there.
    person, cell = np.arange(len(game.inside)), game.canaries.items.astype(np.int64)
    entries = Entries(model.counts.numpy(), person, cell, np.ones(len(cell)), game.inside)
    return entries.told_apart(model.spec.floor, 2.0**-26)


def _finding(scores: list[np.ndarray], inside: list[np.ndarray], delta: float) -> Finding:
    """Scores less the middle of their fit: half of the canaries are in, and a defect may shift all scores alike."""
    score, coin = np.concatenate([one - _middle(one) for one in scores]), np.concatenate(inside)
    correct = int(((score > 0) == coin).sum())
    guesses = 2 * max(1, round(GUESSED * len(coin) / 2))
    order = np.argsort(score, kind="stable")
    surest = int((~coin[order[: guesses // 2]]).sum() + coin[order[-guesses // 2 :]].sum())
    return _of(len(coin), correct, guesses, surest, delta)


def _middle(scores: np.ndarray) -> float:
    """The median; the mean where many scores are the median itself, as with exact counts of 0 and 1."""
    median = float(np.median(scores))
    return median if (scores == median).sum() <= 1 else float(scores.mean())


def _certain(heard: _Heard, delta: float) -> Finding:
    """Only canaries that can be told apart with certainty are guessed; of the others half are right."""
    told, coin = np.concatenate(heard.told), np.concatenate(heard.inside)
    right = int(((told > 0) == coin)[told != 0].sum())
    guesses = int((told != 0).sum())
    return _of(len(coin), right + (len(coin) - guesses) // 2, guesses, right, delta)


def _of(canaries: int, correct: int, guesses: int, surest: int, delta: float) -> Finding:
    mu = mu_refuted(correct, canaries)
    any_mechanism = epsilon_refuted(surest, guesses, canaries, delta) if guesses else 0.0
    return Finding(canaries, correct, guesses, surest, mu, gaussian_epsilon(mu, delta), any_mechanism)
