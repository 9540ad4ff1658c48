"""What a training step costs on one rank or many: seconds, bytes on the wire, memory.

It is arithmetic with a few measured coefficients. A step of a Transformer with width d, feed-forward width f, N blocks and M
items, on n tokens in sequences of length L, has for every token

    head     h = 6 M d + 2 M L [L < d]              operations: 2 forward and 4 backward for each weight; and, where a
                                                    user's norm comes from the Gram matrix, that
    blocks   b = N (6 (4 d^2 + 2 d f) + 12 L d)

and P = M d + L d + N (4 d^2 + 2 d f) parameters. With R ranks that share out the users (`data`), each has n/R tokens and all
parameters; the clipped sum travels to rank 0 and comes back with noise. With the table in R parts (`rows`), each has all n tokens
and M/R items, so p = M d/R + P - M d parameters; what travels is two vectors and two numbers for every token, there and back, and
the parameters outside of the table.

    data     s (n/R (H + b t_block + t) + k t_micro + P t_param) + P t_noise       bytes: 8 P
    rows     s (n (H/R + b t_block + t) + k t_micro + p (t_param + t_noise))       bytes: 8 n (2 d + 2) + 4 (P - M d)
    both     + bytes (R - 1) t_byte + w t_message + (R - 1) t_together + k t_split [rows]

Here H = h t_head + M t_logit (exponentials and the like) and t = t_token + t_user / L; k is the number of micro-batches of a
rank, w that of its messages, t_together what every further rank adds to a step, however small it is, and t_split what a
micro-batch costs more when the table is split. s says that ranks share a machine: with r of them on c cores, each takes
max(1, r/c) times as long, and 1 + (r - 1) `busy` times as long again, since processes share caches and memory. Noise is drawn by
rank 0 while others wait (in `rows` by all). Memory of a rank, u tokens in a micro-batch:

    base + p m_param + u N d m_state + u m_token + min(u M, HOLD) m_logit                     M/R for M in `rows`

The coefficients are fitted by non-negative least squares to relative errors: see `dpformer bench cost`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any, Literal

import numpy as np

from dpformer.clipping.head import HOLD_ELEMENTS, row_budget

Mode = Literal["data", "rows"]
MODES: tuple[Mode, ...] = ("data", "rows")
BYTES = 4  # of a number in float32


@dataclass(frozen=True)
class Step:
    """One step of a training, over all ranks. tokens: predictions of the expected batch; length: of a sequence."""

    tokens: float
    length: float
    items: int
    dim: int
    blocks: int
    feed_forward: int
    token_budget: int = 16384

    @property
    def head_flops(self) -> float:
        """h: of a token."""
        gram = 2.0 * self.items * self.length if self.length < self.dim else 0.0
        return 6.0 * self.items * self.dim + gram

    @property
    def block_flops(self) -> float:
        """b: of a token, all blocks."""
        weights = 4 * self.dim**2 + 2 * self.dim * self.feed_forward
        return self.blocks * (6.0 * weights + 12 * self.length * self.dim)

    @property
    def table(self) -> int:
        """Parameters of the item table."""
        return self.items * self.dim

    @property
    def rest(self) -> int:
        """All other parameters: positions and blocks."""
        weights = 4 * self.dim**2 + 2 * self.dim * self.feed_forward
        return int(math.ceil(self.length) * self.dim + self.blocks * weights)

    @property
    def parameters(self) -> int:
        """P."""
        return self.table + self.rest

    @property
    def flops(self) -> float:
        """Of the whole step."""
        return self.tokens * (self.head_flops + self.block_flops)


@dataclass(frozen=True)
class Layout:
    """How the ranks lie: how many, what they share out, how many of them on a machine, and its cores (or GPUs)."""

    ranks: int = 1
    mode: Mode = "data"
    per_machine: int = 1
    cores: int = 1

    @property
    def crowding(self) -> float:
        """How many ranks a core has to serve, at least 1."""
        return max(1.0, min(self.per_machine, self.ranks) / self.cores)

    @property
    def others(self) -> int:
        """How many ranks run beside one on its machine."""
        return min(self.per_machine, self.ranks) - 1


@dataclass(frozen=True)
class Coefficients:
    """Seconds for a flop of the head, a logit, a flop of the blocks, a token, a user, a micro-batch, a parameter (on every
    rank), a parameter's noise, a byte on the wire, a message, a further rank in a step, a micro-batch of a split table; by how
    much a process is slower for each other one on its machine; and bytes of memory.
    """

    head_flop: float
    logit: float
    block_flop: float
    token: float
    user: float
    micro_batch: float
    parameter: float
    noise: float
    wire_byte: float
    message: float
    together: float
    split: float
    busy: float
    memory_base: float
    memory_parameter: float
    memory_state: float
    memory_token: float
    memory_logit: float

    def faster(self, speed: float) -> Coefficients:
        """For a processor on which computing takes 1/`speed` of the time."""
        names = ("head_flop", "logit", "block_flop", "token", "user", "micro_batch", "parameter", "noise")
        return replace(self, **{name: getattr(self, name) / speed for name in names})


@dataclass(frozen=True)
class Cost:
    """What a step costs a rank. seconds = compute + parameters + noise + wire."""

    compute_seconds: float
    parameter_seconds: float
    noise_seconds: float
    wire_seconds: float
    wire_bytes: float
    messages: float
    memory_bytes: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute_seconds + self.parameter_seconds + self.noise_seconds + self.wire_seconds

    def figures(self) -> dict[str, float]:
        """Ready for JSON."""
        return {"seconds": self.seconds, **asdict(self)}


def micro_batches(step: Step, tokens: float, items: float, kept: float) -> tuple[float, float]:
    """How many micro-batches a rank with `tokens` cuts, and the tokens of one; the head bounds them for a large catalogue.

    kept: rows of the catalogue's width that it keeps of a user.
    """
    users = min(step.token_budget // step.length, row_budget(int(items), step.token_budget) // kept)
    whole = max(1.0, users) * step.length
    return max(1.0, math.ceil(tokens / whole)), min(tokens, whole)


def work(step: Step, layout: Layout) -> dict[str, float]:
    """What a rank does in a step, by the coefficient that prices it; memory too."""
    parts = layout.ranks if layout.mode == "rows" else 1
    tokens = step.tokens if layout.mode == "rows" else step.tokens / layout.ranks
    items, parameters = step.items / parts, step.table / parts + step.rest
    # As the trainer cuts: of a long user, unless the table is split, a row for each column of the table.
    kept = step.length if layout.mode == "rows" else min(step.length, step.dim)
    count, micro = micro_batches(step, tokens, items, kept)
    alone = layout.ranks == 1
    if layout.mode == "rows":
        sent = BYTES * (2 * step.tokens * (2 * step.dim + 2) + step.rest)
        messages = 5 * count + 6
    else:
        sent, messages = 2.0 * BYTES * step.parameters, 6.0
    return {
        "head_flop": tokens * step.head_flops / parts,
        "logit": tokens * items,
        "block_flop": tokens * step.block_flops,
        "token": tokens,
        "user": tokens / step.length,
        "micro_batch": count,
        "parameter": parameters,
        "noise": parameters,
        "wire_byte": 0.0 if alone else sent,
        "message": 0.0 if alone else messages,
        "together": layout.ranks - 1.0,
        "split": count if layout.mode == "rows" and not alone else 0.0,
        "memory_base": 1.0,
        "memory_parameter": parameters,
        "memory_state": micro * step.blocks * step.dim,
        "memory_token": micro,
        "memory_logit": min(micro / step.length * kept * items, HOLD_ELEMENTS),
    }


COMPUTE = ("head_flop", "logit", "block_flop", "token", "user", "micro_batch")
TALK = ("message", "together", "split")
MEMORY = ("memory_base", "memory_parameter", "memory_state", "memory_token", "memory_logit")


def predict(step: Step, layout: Layout, c: Coefficients) -> Cost:
    """The cost of a step on the slowest rank, which is rank 0."""
    done = work(step, layout)
    slow = layout.crowding * (1.0 + layout.others * c.busy)
    return Cost(
        compute_seconds=slow * sum(done[name] * getattr(c, name) for name in COMPUTE),
        parameter_seconds=slow * done["parameter"] * c.parameter,
        noise_seconds=done["noise"] * c.noise * (slow if layout.mode == "rows" else 1.0),
        wire_seconds=done["wire_byte"] * c.wire_byte * (layout.ranks - 1)
        + sum(done[name] * getattr(c, name) for name in TALK),
        wire_bytes=done["wire_byte"],
        messages=done["message"],
        memory_bytes=sum(done[name] * getattr(c, name) for name in MEMORY),
    )


def fit(rows: list[dict[str, float]], measured: list[float], names: tuple[str, ...]) -> dict[str, float]:
    """Non-negative coefficients c with least sum of ((sum_k row_k c_k - measured) / measured)^2.

    >>> fit([{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 2.0}], [3.0, 5.0], ("a", "b"))
    {'a': 3.0, 'b': 1.0}
    """
    from scipy.optimize import nnls

    target = np.array(measured)
    matrix = np.array([[row[name] for name in names] for row in rows]) / target[:, None]
    # The columns differ by ten orders of magnitude, which no solver likes.
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    found, _ = nnls(matrix / scale, np.ones(len(target)))
    return {name: float(round(value, 15) / s) for name, value, s in zip(names, found, scale, strict=True)}


def known() -> dict[str, Any]:
    """The committed figures: `coefficients`, `gemm` (operations a second of a matrix product there), and what was measured."""
    text = resources.files("dpformer.training").joinpath("cost.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def coefficients() -> Coefficients:
    """The committed coefficients."""
    return Coefficients(**known()["coefficients"])
