"""Does the training loop do with the clipped sum what the accountant counts? Real steps of a small training, watched."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor, nn

from dpformer.data import Sequences
from dpformer.fit.dpsgd import Trainer
from dpformer.fit.gradient_sum import Groups
from dpformer.models import Network
from dpformer.privacy import Sample
from dpformer.privacy.query import grid_step
from dpformer.trust.verify.checks import Outcome, Verification
from dpformer.trust.verify.clipping import SLACK, clipping
from dpformer.trust.verify.noise import most_zeros, noise_outcome
from dpformer.trust.verify.reference import Losses, Subject, factors, loop, size
from dpformer.trust.verify.scratch import Chosen
from dpformer.trust.verify.watch import Blank, Curators, Watched

Step = Callable[[np.ndarray], int]

STEP_CHECKS = (
    *("every user once", "expected-batch division", "empty batch", "noise scale", "steps charged", "parameters moving"),
    "sampler",
)
# Groups of a step that are smaller than the plan's, so that a few people fill several.
SMALL_GROUPS = Groups(block=5, most=5)


def losses_of(trainer: Trainer) -> Losses:
    """The losses that a trainer trains with, of any copy of its model."""

    def losses(module: nn.Module, tokens: Tensor) -> Tensor:
        twin = copy.copy(trainer.worker)
        twin.model = module  # type: ignore[assignment]
        return twin.losses(tokens)

    return losses


def definition(module: nn.Module, tokens: Tensor) -> Tensor:
    """One user's loss from its definition, without padding: the mean of -log softmax over the items that follow, `[1]`."""
    tokens = tokens[:, : int((tokens > 0).sum())]
    if tokens.shape[1] < 2:
        return sum(p.sum() * 0.0 for p in module.parameters()).reshape(1)  # type: ignore[union-attr]
    states = module.states(tokens[:, :-1])  # type: ignore[operator]
    logits = states[0] @ module.table[1:].T + module.table_bias[1:]  # type: ignore[index]
    return nn.functional.cross_entropy(logits, tokens[0, 1:] - 1).reshape(1)


def tokens_of(people: Sequences, max_length: int, model: Network) -> Tensor:
    """All of a few people, `[N, L + 1]`: rows of the model's vocabulary, other items left out."""
    places = model.places().numpy()
    rows = [[int(places[i]) for i in one if places[i] > 0] for one in people]
    L = max_length + 1
    tokens = torch.zeros(len(rows), max(1, *(min(L, len(one)) for one in rows)), dtype=torch.int64)
    for k, one in enumerate(rows):
        last = one[-L:]
        tokens[k, : len(last)] = torch.tensor(last, dtype=torch.int64)
    return tokens


def check_steps(verification: Verification, trainer: Trainer, weights: dict[str, Tensor], curators: Curators) -> None:
    """Make a few steps with chosen batches, from these weights, in float64.

    Looked at: each sum before noise, the answer, and what the optimiser got.
    """
    trainer.take(weights)
    trainer.model.double()
    draw = Chosen(trainer.plan.users)
    watched = curators.at_the_steps(draw)
    names = dict(trainer.model.named_parameters())
    begun = {name: p.detach().clone() for name, p in names.items()}

    def step(users: np.ndarray) -> int:
        draw.next = users
        return trainer.make_step(watched).users

    all_users = np.arange(trainer.plan.users)
    verification.check("every user once", lambda: _every_user(trainer, watched, step, curators.people))
    verification.check("expected-batch division", lambda: _division(trainer, watched, step, all_users))
    verification.check("empty batch", lambda: _empty(watched, step))
    verification.check("noise scale", lambda: _scale(trainer, watched))
    verification.check("steps charged", lambda: _charged(watched, len(trainer.plan.releases)))
    still = [name for name, p in names.items() if torch.equal(p.detach(), begun[name])]
    verification.check(
        "parameters moving",
        lambda: Outcome(
            not still,
            f"{len(names)} tensors, all changed in {len(watched.asked)} steps"
            if not still
            else f"never changed: {', '.join(still)}",
            {"still": still, "steps": len(watched.asked)},
        ),
    )
    verification.check("sampler", lambda: sampler_outcome(curators))


def _every_user(trainer: Trainer, watched: Watched, step: Step, people: Sequences) -> Outcome:
    """The sum before noise against the loop, with each user's own norm as the clipping measures it alone."""
    all_users = np.arange(len(people))
    losses, samples, how = losses_of(trainer), (tokens_of(people, trainer.how.max_length, trainer.model),), trainer.how
    grouped = copy.copy(trainer.query)
    grouped.groups = SMALL_GROUPS
    grid = grid_step(grouped.bound, grouped.numbers)
    worst = 0.0
    for users in (all_users, all_users[1::2]):
        # The weights change from step to step, so the loop is made anew.
        subject = Subject(copy.deepcopy(trainer.model), losses, samples, definition, how.max_norm, how.rule)
        single = loop(subject)
        clip = clipping(subject)
        norms = [clip.norms(partial(losses, subject.module, *subject.take([i]))) for i in range(subject.size)]
        inside = torch.zeros(subject.size, dtype=torch.float64)
        inside[torch.from_numpy(users)] = 1.0
        expected = single.weighted(inside * factors(torch.cat(norms), how.max_norm, how.rule), subject.module)
        # In groups of five, then by a step, which has the plan's groups.
        apart = grouped.sum(people, Sample(users, bytes(32)), grid)
        worst = max(worst, _off(apart, expected, grid, len(SMALL_GROUPS.split(users))))
        step(users)
        worst = max(worst, _off(watched.last.sums, expected, grid, len(trainer.query.groups.split(users))))
    return Outcome(
        worst <= SLACK,
        f"batches of {len(all_users)} and {len(all_users[1::2])} users in micro-batches and groups: sums off by {worst:.1e}",
        {"difference": worst},
    )


def _off(sums: Mapping[str, np.ndarray], expected: dict[str, Tensor], grid: float, groups: int) -> float:
    """|sums - expected| / |expected|, less what rounding each group to the grid may change."""
    difference = {name: torch.from_numpy(sums[name] * grid) - value for name, value in expected.items()}
    rounding = groups * grid / 2 * math.sqrt(sum(value.numel() for value in expected.values()))
    return max(0.0, size(difference) - rounding) / max(size(expected), 1e-300)


def _division(trainer: Trainer, watched: Watched, step: Step, all_users: np.ndarray) -> Outcome:
    """The optimiser's gradient is the answer by the expected batch, whatever was drawn."""
    expected, divisors = trainer.plan.batch_size, {}
    for users in (all_users[:1], all_users[:3], all_users):
        step(users)
        values = watched.last.answer.values
        by = [
            float((torch.from_numpy(values[name]) * g).sum() / g.square().sum())
            for name, p in trainer.model.named_parameters()
            if (g := p.grad) is not None
        ]
        divisors[len(users)] = max(by, key=lambda value: abs(value - expected))
    good = all(abs(value / expected - 1) < 1e-6 for value in divisors.values())
    shown = ", ".join(f"{n} drawn: by {value:.6g}" for n, value in divisors.items())
    return Outcome(good, f"expected batch {expected}; {shown}", {"expected": expected, "divisors": divisors})


def _empty(watched: Watched, step: Step) -> Outcome:
    """Nobody is drawn: the sum is 0, and the answer is noise. A number may be 0 by chance: see `most_zeros`."""
    users = step(np.array([], dtype=np.int64))
    asked = watched.last
    largest = max(int(np.abs(value).max()) for value in asked.sums.values())
    numbers = sum(value.size for value in asked.answer.values.values())
    zeros = sum(int((value == 0).sum()) for value in asked.answer.values.values())
    most = most_zeros(numbers, asked.std)
    good = users == 0 and largest == 0 and zeros <= most
    return Outcome(
        good,
        f"a step of noise alone: sum before noise {largest}; {zeros} of {numbers:,} numbers are 0 (sound noise: at most {most})",
        {"largest_before_noise": largest, "zeros": zeros, "most_zeros": most},
    )


def _scale(trainer: Trainer, watched: Watched) -> Outcome:
    """Noise of sigma D on every number, D = C / g (1 + 1e-6 + m 2^-21) + sqrt(d), counted here again."""
    groups = Groups.of(trainer.plan.users, trainer.plan.rate)
    numbers = sum(p.numel() for p in trainer.model.parameters())
    C = trainer.how.max_norm
    scale = noise_outcome([asked.noise for asked in watched.asked])
    off = [asked for asked in watched.asked if not asked.on_grid]
    misstated = 0
    for asked in watched.asked:
        D = C / asked.answer.grid * (1 + 1e-6 + groups.most * 2.0**-21) + math.sqrt(numbers)
        stated = asked.answer.noise_std / asked.answer.grid
        misstated += not math.isclose(trainer.plan.noise_multiplier * D, stated, rel_tol=1e-12)
    detail = (
        f"{scale.detail}; {trainer.plan.noise_multiplier:.4g} x C = {C:g}, and {D * asked.answer.grid / C - 1:.1e} more"
    )
    detail += "; not on the grid" if off else "; all on the grid"
    detail += "; an answer states other noise than planned" if misstated else ""
    return Outcome(
        scale.good and not off and not misstated,
        detail,
        {**scale.figures, "off_grid": len(off), "misstated": misstated},
    )


def _charged(watched: Watched, before: int) -> Outcome:
    asked, charged = len(watched.asked), len(watched.charged) - before
    return Outcome(asked == charged, f"{asked} answers, {charged} charged", {"answers": asked, "charged": charged})


def sampler_outcome(curators: Curators) -> Outcome:
    """Who is drawn against the definition: person i if the i-th 64-bit word of ChaCha20 is below floor(rate 2^64)."""
    watched = curators.at_the_steps()
    users, rate = len(curators.people), curators.plan.rate
    for _ in range(curators.plan.steps):
        watched.ask(Blank())
    wrong = [
        k for k, asked in enumerate(watched.asked, 1) if asked.sample.drawn.tolist() != _drawn(asked.key, users, rate)
    ]
    keys = len({asked.key for asked in watched.asked})
    sizes = [len(asked.sample.drawn) for asked in watched.asked]
    detail = f"{len(sizes)} draws of {users} users at rate {rate:g}: sizes {min(sizes)} to {max(sizes)}, {keys} keys"
    if wrong:
        detail += f"; others than the cipher draws at step {wrong[0]}"
    return Outcome(not wrong and keys == len(sizes), detail, {"draws": len(sizes), "wrong": len(wrong), "keys": keys})


def _drawn(key: bytes, users: int, rate: float) -> list[int]:
    nonce = bytes(4) + (2).to_bytes(12, "little")  # stream 2 of a key: draws of users
    stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(8 * users))
    bound = math.floor(Fraction(rate) * 2**64)
    return [i for i in range(users) if int.from_bytes(stream[8 * i : 8 * i + 8], "little") < bound]
