"""The whole method of DPFormer on one page: a tied Transformer, Re-Attention, Phantom Clipping, DP-SGD, accounting.

This file is for reading. Do not publish a model that it trains: it adds floating-point noise from torch's generator.
The values that a float sum plus float noise can take depend on the data, so one released value can show who was in the
sum; the library `dpformer` therefore adds exact integer noise to integers.

`eq. ...` is a label in the paper's LaTeX source. Where a formula differs from the printed one, a comment says how.
Shapes: B users, T tokens per user, d features, M items. Each value x [B, T, d] comes with `var` [B, T], the variance
that privacy noise gives its coordinates; no gradient goes through `var`. Run: `python nano_dpformer.py [steps]`.
"""

import math
import sys

import dp_accounting as dp
import torch
from torch import nn
from torch.nn import functional as F

from dpformer.data import demo_frame


@torch.no_grad()
def relu_variance(c, var):
    """eq. relunpn, minus the squared mean m^2; the printed formula subtracts c^2 and is negative for c < 0."""
    std = var[..., None].sqrt().clamp_min(1e-12)
    cdf, pdf = torch.special.ndtr(c / std), torch.exp(-0.5 * (c / std).square()) / math.sqrt(2 * math.pi)
    m = c * cdf + std * pdf
    return ((c.square() + std.square()) * cdf + c * std * pdf - m.square()).clamp_min(0).mean(-1)


def layer_norm(x, var, eps=1e-5):
    """Without gain and shift: linear layers learn them. The variance is a first-order rule; the paper has none."""
    return F.layer_norm(x, x.shape[-1:], eps=eps), var / (x.detach().var(-1, correction=0) + eps)


def re_attention(q, k, var_k, cap=5.0):
    """Attention scores [B, T, T] without the factor exp(C var / 2) of eq. reattnbias, where C = |q|^2 / d."""
    d, future = q.shape[-1], torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    penalty = q.square().sum(-1, keepdim=True) / d * var_k[:, None, :] / 2  # C var / 2, [B, T, T]
    smallest = penalty.masked_fill(future, torch.inf).amin(-1, keepdim=True)
    # The paper divides the scores after the softmax. With corrected logits the scores of a row still sum to 1. Only
    # differences within a row matter. The cap, in nats, is for rare items: their variance can be very large.
    logits = q @ k.mT / math.sqrt(d) - (penalty - smallest).clamp_max(cap)
    return logits.masked_fill(future, -torch.inf).softmax(-1)


class Linear(nn.Linear):
    def forward(self, a, var):
        self.a, self.y, W = a, F.linear(a, self.weight, self.bias), self.weight.detach()  # a, y: for Phantom Clipping
        with torch.no_grad():  # eq. linearnpn, with the sum over inputs that the printed formula leaves out
            var = var * W.square().sum() / len(W) + self.var_w * (a.shape[-1] * var + a.square().sum(-1))
        return self.y, var


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v, self.o, self.up, self.down = (Linear(d, d) for _ in range(6))

    def forward(self, x, var):
        h, var_h = layer_norm(x, var)
        (q, _), (k, var_k), (v, var_v) = self.q(h, var_h), self.k(h, var_h), self.v(h, var_h)
        S = re_attention(q, k, var_k)
        o, var_o = self.o(S @ v, (S.detach().square() @ var_v[..., None])[..., 0])
        x, var = x + o, var + var_o
        c, var_c = self.up(*layer_norm(x, var))
        y, var_y = self.down(c.relu(), relu_variance(c, var_c))
        return x + y, var + var_y


class Transformer(nn.Module):
    def __init__(self, sigma, batch_size, p_items, p_positions, d=32, blocks=2):
        super().__init__()
        self.E = nn.Parameter(torch.randn(len(p_items), d) * 0.1)  # shared: the input layer and the output layer
        self.P = nn.Parameter(torch.randn(len(p_positions), d) * 0.1)
        self.blocks = nn.ModuleList(Block(d) for _ in range(blocks))
        # eq. effectiveerror: std = sigma / (B p), where p is the share of users whose sequences use the parameter.
        var_w, self.var_E, self.var_P = ((sigma / (batch_size * p)) ** 2 for p in (1.0, p_items, p_positions))
        self.linears = [layer for layer in self.modules() if isinstance(layer, Linear)]
        self.apply(lambda layer: setattr(layer, "var_w", var_w))

    def forward(self, s):
        x, var = self.E[s] + self.P[: s.shape[1]], self.var_E[s] + self.var_P[: s.shape[1]]
        self.s, self.x = s, x
        for block in self.blocks:
            x, var = block(x, var)
        self.H, _ = layer_norm(x, var)
        return self.H

    def losses(self, s, lengths):
        """Each user's mean cross-entropy [B]. Padding comes last, so in causal attention it gets no gradient."""
        self.logits = self(s[:, :-1]) @ self.E.T
        loss = F.cross_entropy(self.logits.mT, s[:, 1:], reduction="none")
        real = torch.arange(1, s.shape[1]) < lengths[:, None]
        return (loss * real).sum(1) / real.sum(1)


def phantom_terms(s, x, H, D):
    """eq. phantom: three terms [B] that sum to |G_E|^2, for G_E = onehot(s)' x + D' H. The first is printed squared."""
    # x [B, T, d]: gradient at E[s]; H [B, T, d]: input of the logits; D [B, T, M]: gradient at the logits.
    same = s[:, :, None] == s[:, None]  # [s_t = s_u], [B, t, u]
    first = (same * (x @ x.mT)).sum((1, 2))  # sum_{t,u} [s_t = s_u] <x_t, x_u>
    second = ((H @ H.mT) * (D @ D.mT)).sum((1, 2))  # <H H', D D'>
    cross = 2 * (D.gather(2, s[:, None].expand_as(same)) * (H @ x.mT)).sum((1, 2))  # 2 sum_{t,u} D[u, s_t] <x_t, H_u>
    return first, second, cross


def clip(model, s, lengths, C=1.0):
    """Write sum_i c_i g_i to `.grad` by one backward pass, and return the norms |g_i| [B]. No g_i is ever built."""
    losses = model.losses(s, lengths)
    x, D, *gs = torch.autograd.grad(losses.sum(), [model.x, model.logits, *(layer.y for layer in model.linears)])
    with torch.no_grad():
        squared = sum(phantom_terms(model.s, x, model.H, D)) + x.square().sum((1, 2))  # E, and P: one use per position
        for layer, g in zip(model.linears, gs, strict=True):
            # |G|^2 = sum_{t,u} <a_t, a_u> <g_t, g_u>. The bias is the weight of one more input that is always 1.
            squared += ((layer.a @ layer.a.mT + 1) * (g @ g.mT)).sum((1, 2))
        norms = squared.clamp_min(0).sqrt()
        c = (C / (norms + 0.01))[:, None, None]  # the automatic rule, as in the paper's experiments: |c_i g_i| < C
        model.E.grad = (c * D).flatten(0, 1).T @ model.H.flatten(0, 1)
        model.E.grad.index_add_(0, model.s.flatten(), (c * x).flatten(0, 1))
        model.P.grad = F.pad((c * x).sum(0), (0, 0, 0, len(model.P) - x.shape[1]))
        for layer, g in zip(model.linears, gs, strict=True):
            layer.weight.grad = (c * g).flatten(0, 1).T @ layer.a.flatten(0, 1)
            layer.bias.grad = (c * g).sum((0, 1))
    return norms


def spent(sigma, rate, steps, sigma_counts, delta):
    """Epsilon by PLD: one sum over all users and `steps` over Poisson batches. Neighbours: a user's events removed."""
    step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma))
    events = [dp.GaussianDpEvent(sigma_counts), dp.SelfComposedDpEvent(step, steps)]
    account = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-3)
    return account.compose(dp.ComposedDpEvent(events)).get_epsilon(delta)


def ndcg(scores, seen, targets):
    """NDCG@10 of each user's target among all items that the user has not seen. Ties count against the model."""
    scores = scores.masked_fill(seen, -torch.inf)
    rank = (scores >= scores.gather(1, targets[:, None])).sum(1)
    return torch.where(rank <= 10, 1 / torch.log2(rank + 1), 0).mean().item()


def main(steps=150, epsilon=8.0, delta=1e-5, B=512, C=1.0, sigma_counts=4.0, M=500, T=20, lr=0.03):
    torch.manual_seed(0)  # the same result every time; noise from a known seed protects nobody
    frame = demo_frame().group_by("user_id", maintain_order=True).agg("item_id")  # sorted by time
    people = [torch.tensor([int(item[-3:]) for item in items]) for items in frame["item_id"]]
    N, histories, targets = len(people), [s[:-1] for s in people], torch.stack([s[-1] for s in people])
    s = nn.utils.rnn.pad_sequence([h[-T - 1 :] for h in histories], batch_first=True)  # [N, T + 1]
    lengths = torch.tensor([min(len(h), T + 1) for h in histories])
    low, sigma = 0.3, 30.0
    while sigma / low > 1.001:  # the smallest noise that the budget allows
        middle = math.sqrt(low * sigma)
        low, sigma = (low, middle) if spent(middle, B / N, steps, sigma_counts, delta) <= epsilon else (middle, sigma)
    # p for eq. effectiveerror. The paper assumes that p is public. Here p is a noisy count, and epsilon includes it.
    real = (torch.arange(T + 1) < lengths[:, None]).float()
    uses = torch.cat([torch.zeros(N, M).scatter_add_(1, s, real).clamp_max(1), real[:, 1:]], 1)  # 1 if used: [N, M + T]
    noise = sigma_counts * math.sqrt(2 * T + 1)  # a user has at most 2 T + 1 ones
    p = ((uses.sum(0) + noise * torch.randn(M + T)) / N).clamp(noise / N, 1)
    model = Transformer(sigma, B, p[:M], p[M:])
    adam = torch.optim.Adam(model.parameters())
    for step in range(steps):
        drawn = torch.rand(N) < B / N  # Poisson sampling: each user independently
        clip(model, s[drawn], lengths[drawn], C)
        for w in model.parameters():  # eq. DPSGD, with the noise outside of Clip; B is the expected batch size
            w.grad = (w.grad + sigma * C * torch.randn_like(w)) / B
        adam.param_groups[0]["lr"] = lr * min((step + 1) / (0.2 * steps), (steps - step) / (0.8 * steps))
        adam.step()
    print(f"epsilon {spent(sigma, B / N, steps, sigma_counts, delta):.2f} at delta {delta:g}, sigma {sigma:.2f}")
    with torch.no_grad():
        H = model(nn.utils.rnn.pad_sequence([h[-T:] for h in histories], batch_first=True))
        scores = H[torch.arange(N), lengths.clamp_max(T) - 1] @ model.E.T
    counts = torch.stack([h.bincount(minlength=M) for h in histories])
    of_model, of_popularity = (ndcg(x, counts > 0, targets) for x in (scores, counts.sum(0).float().expand(N, M)))
    print(f"NDCG@10 of the last item: {of_model:.3f}, popularity {of_popularity:.3f} (not private)")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
